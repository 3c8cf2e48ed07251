"""Check muP by coordinates: how large activations are, and how far training moves them, at several widths.

Under muP (arXiv 2203.03466, appendix D.1) both stay the same as the width grows; with one learning rate for everything
the change after a few steps grows with the width, most of all in the logits. The models learn one fixed batch.

    python experiments/mup_check.py
    python experiments/mup_check.py --connection residual --widths 64 128 256 --out mup.png
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from residua.errors import InputError, require
from residua.lab.records.figures import plain, save
from residua.lab.records.table import print_table
from residua.lab.training import TrainConfig, make_optimizer
from residua.models import ResiduaConfig, ResiduaForCausalLM

VOCABULARY, SEQUENCES, LENGTH, LAYERS, HEAD_DIM = 256, 8, 64, 2, 32
PARAMETERISATIONS = {"muP": True, "standard": False}
FLAT = 0.25
"""A slope up to this is called flat: by theory it is 0, or for what grows 1 / 2 or 1."""


@dataclass(frozen=True)
class Coordinate:
    """The root mean square of one activation by width, at the start, and of its change by the last step."""

    parameterisation: str
    site: str
    start: Mapping[int, float]
    change: Mapping[int, float]

    @property
    def slope(self) -> float:
        """d log change / d log width, by least squares."""
        return _slope(self.change)

    @property
    def verdict(self) -> str:
        if not math.isfinite(self.slope):
            return "diverges"
        return "flat" if abs(self.slope) <= FLAT else "grows" if self.slope > 0 else "shrinks"


def check(
    connection: str | Mapping[str, Any] = "ddl-tc",
    *,
    widths: Sequence[int] = (64, 128, 256, 512),
    steps: int = 4,
    lr: float = 0.01,
    seeds: int = 2,
) -> list[Coordinate]:
    """Train small models of every width for a few steps of Adam, with muP (base: the first width) and without.

    Args:
        lr: the learning rate at the base width.
        seeds: runs to average over.

    Raises:
        InputError: there are fewer than two widths, one is not a multiple of 32, a number is out of range, or the
            scheme is unknown or does not fit a width.
    """
    widths = sorted(set(widths))
    multiples = len(widths) > 1 and all(width >= HEAD_DIM and width % HEAD_DIM == 0 for width in widths)
    require(multiples, "--widths", f"at least two multiples of {HEAD_DIM}", widths)
    for name, value in (("steps", steps), ("seeds", seeds), ("lr", lr)):
        require(0 < value < math.inf, f"--{name}", "a positive number", value)
    try:
        configs = {
            (name, width): _config(connection, width, widths[0], mup)
            for name, mup in PARAMETERISATIONS.items()
            for width in widths
        }
    except ValueError as error:
        raise InputError(f"--connection: {str(error).removeprefix('connection: ')}") from error
    found: dict[tuple[str, str], list[dict[int, float]]] = {}
    for name in PARAMETERISATIONS:
        for width in widths:
            runs = [_run(configs[name, width], steps, lr, seed) for seed in range(seeds)]
            for site in runs[0]:
                start, change = found.setdefault((name, site), [{}, {}])
                start[width] = fmean(run[site][0] for run in runs)
                change[width] = fmean(run[site][1] for run in runs)
    return [Coordinate(name, site, *values) for (name, site), values in found.items()]


def draw(coordinates: Sequence[Coordinate], path: str | Path) -> None:
    """Draw the change of every activation against the width, one panel for each parameterisation."""
    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(PARAMETERISATIONS), sharey=True)
    for panel, name in zip(panels, PARAMETERISATIONS):
        for coordinate in coordinates:
            if coordinate.parameterisation == name:
                widths = list(coordinate.change)
                panel.plot(widths, [coordinate.change[w] for w in widths], marker="o", label=coordinate.site)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("Width")
        panel.set_title(name)
        plain(panel)
    panels[0].set_ylabel("Root mean square of the change")
    panels[0].legend(frameon=False)
    save({Path(path).name: figure}, Path(path).parent)


def _config(connection: str | Mapping[str, Any], width: int, base: int, mup: bool) -> ResiduaConfig:
    return ResiduaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD_DIM,
        max_position_embeddings=LENGTH,
        connection=connection if isinstance(connection, str) else dict(connection),
        mup=mup,
        mup_base_width=base,
        embedding_init_std=0.1,
    )


def _run(config: ResiduaConfig, steps: int, lr: float, seed: int) -> dict[str, tuple[float, float]]:
    """Return by site the root mean square at the start, and of the change after `steps`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # A few tokens are frequent, as in text.
        shares = 1 / torch.arange(1, VOCABULARY + 1)
        ids = shares.multinomial(SEQUENCES * LENGTH, replacement=True).view(SEQUENCES, LENGTH)
        model = ResiduaForCausalLM(config).train()
    optimizer = make_optimizer(model, TrainConfig(lr=lr, weight_decay=0.0, steps=steps))
    start = _activations(model, ids)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    end = _activations(model, ids)
    return {site: (_rms(start[site]), _rms(end[site] - start[site])) for site in start}


def _activations(model: ResiduaForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """Return the outputs of the embedding, the last sublayers and the stream, and the logits."""
    last = model.model.layers[-1]
    sites: dict[str, nn.Module] = {
        "embedding": model.model.embed_tokens,
        "attention": last.attention,
        "mlp": last.mlp,
        "hidden": model.model.norm,
    }
    found: dict[str, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for site, module in sites.items():
            hook = module.register_forward_hook(lambda _, __, output, site=site: found.update({site: output.clone()}))
            hooks.callback(hook.remove)
        found["logits"] = model(input_ids=ids, use_cache=False).logits
    return {site: found[site] for site in (*sites, "logits")}


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def _slope(values: Mapping[int, float]) -> float:
    if any(not 0 < value < math.inf for value in values.values()):
        return math.nan
    x, y = [math.log(width) for width in values], [math.log(value) for value in values.values()]
    middle, level = fmean(x), fmean(y)
    return sum((a - middle) * (b - level) for a, b in zip(x, y)) / sum((a - middle) ** 2 for a in x)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connection", default="ddl-tc", help="the scheme (%(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="multiples of 32")
    parser.add_argument("--steps", type=int, default=4, help="of Adam (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="at the smallest width (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs to average over (%(default)s)")
    parser.add_argument("--out", type=Path, help="draw a picture here")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    try:
        coordinates = check(**options)
    except InputError as error:
        parser.error(str(error))
    if out is not None:
        draw(coordinates, out)
    rows = [
        [c.parameterisation, c.site, *(f"{change:.4g}" for change in c.change.values()), f"{c.slope:+.2f}", c.verdict]
        for c in coordinates
    ]
    print_table(["parameters", "activation", *map(str, coordinates[0].change), "slope", ""], rows)
    print(
        f"\nRoot mean square of the change of each activation in {options['steps']} steps, by width; slope in log-log."
    )


if __name__ == "__main__":
    main()
