"""Traces made by hand: what they hold is known, so a page that shows something else is wrong."""

import torch
from torch import Tensor

from residua.lab.inspection.spectrum import alignment, effective_rank, matrix_products, rank_one_products
from residua.lab.inspection.trace import Trace

WORDS = ("The", " function", " returns", " a", " new", " list", " of", " the", " names", ".")
HOSTILE = "</script><img src=x onerror=alert(1)>"


def delta(beta: Tensor, *, directions: Tensor | None = None, tokens: list[str] | None = None, **facts: object) -> Trace:
    """A trace of delta writes (d_v = 1). beta: (sublayers, tokens). directions: (sublayers, dim) unit rows,
    the same at every token; the first axes without it."""
    sublayers, count = beta.shape
    if directions is None:
        directions = torch.eye(max(sublayers, 8))[:sublayers]
    sampled = sampled_positions(count)
    readout = torch.linspace(-1, 1, sublayers * count).view(sublayers, count, 1)
    target = torch.linspace(2, 1, sublayers * count).view(sublayers, count, 1)
    k = directions[:, None, :].expand(-1, len(sampled), -1).contiguous()
    composite = {"alignment": alignment(k), "effective_rank": effective_rank(k)}
    composite |= rank_one_products(k, beta[:, sampled])._asdict()
    values = shared(sublayers, count) | {
        "beta": beta,
        "readout": readout,
        "target": target,
        "erase_norm": beta * readout.norm(dim=-1),
        "write_norm": beta * target.norm(dim=-1),
        "discrepancy_norm": (target - readout).norm(dim=-1),
        "direction": k,
        **{name: value.float() for name, value in composite.items()},
    }
    found = described("rank-one", sublayers, sampled, preset="ddl", gates={"beta": [0.0, 2.0]})
    return Trace(found | facts, words(count, tokens), values)


def streams(sublayers: int = 4, count: int = 10, n: int = 3, **facts: object) -> Trace:
    """A trace of mixed streams whose mixing matrix of sublayer s is a mixture of the identity and the mean."""
    sampled = sampled_positions(count)
    weight = torch.linspace(0, 0.6, sublayers)
    mix = (1 - weight)[:, None, None] * torch.eye(n) + weight[:, None, None] / n
    h_res = mix[:, None].expand(-1, count, -1, -1).contiguous()
    position = torch.arange(count, dtype=torch.float32)
    h_pre = (torch.arange(n) + 1.0)[None, None] / 10 + position[None, :, None] / 100
    h_post = 1 + (torch.arange(sublayers)[:, None, None] + torch.arange(n)[None, None]) / 10
    values = shared(sublayers, count) | {
        "h_pre": h_pre.expand(sublayers, -1, -1).contiguous(),
        "h_post": h_post.expand(-1, count, -1).contiguous(),
        "h_res": h_res,
        "row_error": torch.full((sublayers, count), 1e-6),
        "column_error": torch.full((sublayers, count), 2e-4),
        "orthogonality_error": weight[:, None].expand(-1, count).contiguous(),
        "stream_similarity": torch.linspace(1, 0.4, (sublayers + 1) * count).view(sublayers + 1, count),
        **products(mix, len(sampled)),
    }
    return Trace(described("mixing", sublayers, sampled, preset="mhc", rows=n, **facts), words(count), values)


def geometric(sublayers: int = 4, count: int = 10, **facts: object) -> Trace:
    """A trace of a blend of rotation and reflection: gamma rises with the tokens, the angle with the sublayers."""
    sampled = sampled_positions(count)
    gamma = torch.linspace(0, 1, count).expand(sublayers, -1).contiguous()
    angle = torch.linspace(0.1, 1.5, sublayers)[:, None].expand(-1, count).contiguous()
    values = shared(sublayers, count) | {
        "gamma": gamma,
        "angle": angle,
        "cayley_beta": torch.tan(angle / 2),
        **products(torch.eye(2).expand(sublayers, -1, -1), len(sampled)),
    }
    gates = {"gamma": [0.0, 1.0], "angle": None, "cayley_beta": None}
    return Trace(described("mixing", sublayers, sampled, preset="edelta", gates=gates, **facts), words(count), values)


def gated(gates: dict[str, Tensor], **facts: object) -> Trace:
    """A trace of residual scales that depend on these gates, (sublayers, tokens) each, in (-1, 1) from 0."""
    sublayers, count = next(iter(gates.values())).shape
    ranges = {name: [-1.0, 1.0] for name in gates}
    found = described("mixing", sublayers, sampled_positions(count), preset=None, gates=ranges, **facts)
    return Trace(found, words(count), shared(sublayers, count) | gates)


def depth(sublayers: int = 4, count: int = 100, *, reads: tuple[str, ...] = (), negative: bool = False) -> Trace:
    """A trace of attention over depth: sublayer s has the embedding and s outputs as sources, with weights that rise.

    The last token's weights lie on the embedding alone. Read r has weights 1 + r times as large; with `negative` those
    of the embedding are negative. The second sublayer reads none.
    """
    sampled = sampled_positions(count)
    later = torch.tril(torch.arange(1.0, sublayers + 1).expand(sublayers, -1))
    weights = (later / later.sum(1, keepdim=True))[:, None, None].repeat(1, len(sampled), max(1, len(reads)), 1)
    weights[:, -1], weights[:, -1, :, 0] = 0.0, 1.0
    weights = weights * (1 + torch.arange(weights.shape[2]))[:, None]
    if negative:
        weights[..., 0] *= -1
    weights[1] = 0.0
    found = described(None, sublayers, sampled, preset="attnres", reads=list(reads))
    found["sources"] = ["embedding", *found["sublayers"][:-1]]
    found["left_out"] = {"depth_weights": [1]}
    values = shared(sublayers, count) | {
        "depth_weights": weights,
        "depth_mean": weights.mean(1),
        "sources_read": torch.linspace(1, sublayers, sublayers * count).view(sublayers, count),
    }
    return Trace(found, words(count), values)


def residual(sublayers: int = 4, count: int = 10, **facts: object) -> Trace:
    """A trace of the plain residual."""
    return Trace(
        described(None, sublayers, sampled_positions(count), preset="residual", **facts),
        words(count),
        shared(sublayers, count),
    )


def shared(sublayers: int, count: int) -> dict[str, Tensor]:
    """What every trace has. The state's norm is 1 at the start and grows by one half in every sublayer."""
    loss = torch.linspace(5, 3, count)
    loss[-1] = torch.nan
    ones = torch.ones(sublayers, count)
    return {
        "token_ids": torch.arange(count),
        "token_loss": loss,
        "state_norm": 1 + 0.5 * torch.arange(sublayers + 1)[:, None] * torch.ones(count),
        "input_norm": 2 * ones,
        "output_norm": 3 * ones,
        "change_norm": 0.5 * ones,
    }


def described(
    shortcut: str | None,
    sublayers: int,
    sampled: list[int],
    *,
    rows: int = 1,
    gates: dict[str, list[float] | None] | None = None,
    **facts: object,
) -> dict:
    """The facts of a trace. gates: the ends of their ranges, None for those without."""
    names = [f"{number // 2 + 1} {('attention', 'mlp')[number % 2]}" for number in range(sublayers)]
    return {
        "version": 1,
        "residua": "0.1.0",
        "preset": None,
        "scheme": {"scheme": facts.get("preset") or "planted"},
        "shortcut": shortcut,
        "causal": True,
        "constraint": None,
        "gates": {name: {"range": ends, "start": None} for name, ends in (gates or {}).items()},
        "left_out": {},
        "dim": 8,
        "rows": rows,
        "sublayers": names,
        "run": None,
        "checkpoint": None,
        "sampled": sampled,
        "loss": 4.0,
        "date": "2026-01-01T00:00:00+00:00",
        **facts,
    }


def sampled_positions(count: int, most: int = 64) -> list[int]:
    return sorted({round(place) for place in torch.linspace(0, count - 1, min(most, count)).tolist()})


def words(count: int, tokens: list[str] | None = None) -> list[str]:
    return tokens if tokens is not None else [WORDS[position % len(WORDS)] for position in range(count)]


def products(shortcuts: Tensor, samples: int) -> dict[str, Tensor]:
    """Of shortcuts (sublayers, n, n), the same at every sample, after each of them."""
    composite = matrix_products(shortcuts[:, None].expand(-1, samples, -1, -1))
    return {name: value.float() for name, value in composite._asdict().items()}
