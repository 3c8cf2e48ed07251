"""The page of a scheme, generated from its class: equation, code that runs, start, cost, options, results, users."""

import io
import re
import textwrap
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import nn

import residua
from residua.connections import resolve
from residua.evaluation.published import ROWS
from residua.models import SIZES
from residua.study.plan import load_study

DOCS = Path(__file__).parent

# Title, and who runs the scheme: what the sources say, not who might.
ABOUT = {
    "residual": ("Plain residual", "Nearly every Transformer in use."),
    "lambdas": (
        "Scaled plain residual",
        "nanochat, and modded-nanogpt with gates for each token beside the scalars. LayerScale is common in vision "
        "transformers.",
    ),
    "siamese": (
        "SiameseNorm",
        "The authors' experiments, up to 15B parameters (`Qwen-Applications/SiameseNorm`), and a model of 1B on the "
        "recipe of OLMo 3, together with another change (`ArchSpace-Collection/SiameseNorm-DepthAttention`).",
    ),
    "gated_orthogonal": (
        "Gated orthogonal update",
        'Nobody yet: it is a form of our own. With `gate="one"`, the authors\' experiments, mostly on images.',
    ),
    "gated_delta": (
        "Gated delta",
        "Nobody yet: it is a form of our own, Deep Delta Learning with a gate for each of its two halves.",
    ),
    "deep_delta": (
        "Deep Delta Learning",
        "The authors' public code. No released checkpoint of another group is known. In their repository (July 2026) "
        "the authors do not claim that their gains, from single runs, are statistically resolved.",
    ),
    "hyper": (
        "Hyper-connections",
        "The authors' experiments; its constrained successor mHC is what released models use.",
    ),
    "frac": ("Frac-Connections", "The authors' experiments, up to 7B parameters. No released model is known."),
    "mhc": (
        "Manifold-constrained hyper-connections",
        "DeepSeek-V4 and GLM-5.3-Flash, in a form of their own: [mhc_deepseek](mhc_deepseek.md).",
    ),
    "mhc_deepseek": (
        "mHC of DeepSeek-V4 and GLM-5.3",
        "DeepSeek-V4 (`deepseek_v4` in transformers) and GLM-5.3-Flash (`glm5_next`). `residua.dialects` loads their "
        "parameters.",
    ),
    "krom": ("KromHC", "The authors' experiments. No released model is known."),
    "ihc": (
        "Independent hyper-connections",
        "Hy4 of Tencent (`hy_v4` in transformers). `residua.dialects` loads its parameters.",
    ),
    "gated_residual": (
        "Gated residual",
        "Qwen4-Exp (`qwen4_exp` in transformers). `residua.dialects` loads its parameters.",
    ),
    "jpmhc": ("JPmHC", "The authors' experiments. No released model is known."),
    "edelta": ("EDelta-MHC-Geo", "The authors' experiments. No released model is known."),
    "edelta_stream": ("EDelta-MHC-Geo with streams", "The authors' experiments. No released model is known."),
    "pooled_householder": (
        "Pooled Householder",
        'The comparison in arXiv 2605.06729, under the name "DDL". It is not Deep Delta Learning.',
    ),
    "delta_attnres": (
        "Delta attention residuals",
        "The authors' experiments (`wdlctc/delta-attention-residuals-code`). No released model is known.",
    ),
    "denseformer": ("DenseFormer", "The authors' experiments (`epfml/DenseFormer`). No released model is known."),
    "mudd": (
        "MUDD connections",
        "MUDDFormer-2.8B and MUDDPythia (1.4B and 2.8B), released by the authors (`Caiyun-AI/MUDDFormer`).",
    ),
    "attnres": (
        "Attention residuals",
        "Kimi K3 (blocks of layers) and, in a form of its own, Inkling-2: [attnres_inkling](attnres_inkling.md).",
    ),
    "attnres_inkling": (
        "Attention residuals of Inkling-2",
        "Inkling-2 (`inkling2` in transformers). `residua.dialects` loads its parameters.",
    ),
    "altup": (
        "AltUp with LAuReL",
        "Gemma 3n (`gemma3n` in transformers). `residua.dialects` loads its parameters.",
    ),
}


# Options for the code of a page, whose sublayers take one input.
WITH = {"mudd": 'ways="r"'}


def names() -> list[str]:
    """Return the names of all schemes."""
    return list(residua.SCHEMES)


def title(name: str) -> str:
    return ABOUT[name][0]


def presets(name: str) -> dict[str, residua.Scheme]:
    return {preset: scheme for preset, scheme in residua.PRESETS.items() if type(scheme) is residua.SCHEMES[name]}


def page(name: str) -> str:
    """Return the Markdown of the page of the scheme with this name."""
    kind = residua.SCHEMES[name]
    about = [
        part for part in cleandoc(kind.__doc__).split("\n\n") if part.split(maxsplit=1)[0].strip(",") not in told(kind)
    ]
    code = snippet(name)
    parts = [
        f"# {title(name)}",
        f"```text\n{kind.equation}\n```",
        f"Source: {sources(name)}. Class: `residua.{kind.__name__}`. [Deviations](../deviations.md) lists where "
        "papers, code and this library differ.",
        *map(joined, about),
        "## Use it",
        f"```python\n{code}```",
        f"It prints:\n\n```text\n{printed(code)}```",
        "## Presets: start and cost",
        "State: numbers per token in widths d, from the first to the last of 24 sublayers where it grows. Parameters: "
        "what the scheme adds to a language model with the plain residual. Start: the relative difference of an "
        "untrained stack from the plain pre-norm residual, after the final norm; 0 means that training starts from the "
        "plain residual.",
        costs(name),
        "## Options",
        options(kind),
        "## Results",
        results(name),
        "## Who runs it",
        ABOUT[name][1],
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sources(name: str) -> str:
    """Return the sources of the presets, with links; each with its presets if there are several."""
    by_source: dict[str, list[str]] = {}
    for preset, scheme in presets(name).items():
        by_source.setdefault(scheme.source, []).append(f"`{preset}`")
    parts = [source if len(by_source) == 1 else f"{source} ({', '.join(own)})" for source, own in by_source.items()]
    linked = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", "; ".join(parts))
    return re.sub(r"github\.com/(\S+/(\w+))", r"[\2](https://github.com/\1)", linked)


def snippet(name: str) -> str:
    """Return code that builds the scheme's first preset and prints its coefficients."""
    kind = residua.SCHEMES[name].__name__
    return textwrap.dedent(f"""\
        import torch
        from residua import {kind}

        torch.manual_seed(0)
        sublayers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        stream = {kind}({WITH.get(name, "")}).build(dim=64, num_sublayers=4)
        x = torch.randn(2, 16, 64)
        state = stream.expand(x)
        for connection, sublayer in zip(stream.connections[:2], sublayers):
            state = connection(state, sublayer)
        _, carry = stream.connections[2].read(state)
        for name, coefficient in carry.coefficients._asdict().items():
            print(name, getattr(coefficient, "shape", coefficient))
        print(stream(x, sublayers).shape)
        """)


def printed(code: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, "scheme page", "exec"), {})
    return out.getvalue()


def costs(name: str) -> str:
    rows = [["preset", "options", "state", "parameters at 124M", "at 353M", "start"]]
    kind = residua.SCHEMES[name]
    default = kind()
    for preset, scheme in presets(name).items():
        changed = {
            field.name: getattr(scheme, field.name) for field in fields(scheme) if field.name not in kind.derived
        }
        listed = [f"`{option}={value!r}`" for option, value in changed.items() if value != getattr(default, option)]
        counts = [f"{added(scheme, size):+,}" for size in ("small", "medium")]
        rows.append([f"`{preset}`", " ".join(listed), state(scheme), *counts, start(scheme)])
    return table(rows)


def state(scheme: residua.Scheme) -> str:
    """Return the size of the state of a token, from the first to the last of 24 sublayers where it grows."""
    sizes = dict.fromkeys(scheme.state_size(boundary, 1) for boundary in (0, 24))
    return " to ".join("d" if size == 1 else f"{size}d" for size in sizes)


def added(scheme: residua.Scheme, size: str) -> int:
    """Count the parameters beyond the plain residual in a model of the paper's size "small" or "medium"."""
    return parameters(scheme, size) - parameters(residua.Residual(), size)


@cache
def parameters(scheme: residua.Scheme, size: str) -> int:
    with torch.device("meta"):
        stream = scheme.build(SIZES[size]["hidden_size"], 2 * SIZES[size]["num_hidden_layers"])
    return sum(parameter.numel() for parameter in stream.parameters())


@torch.no_grad()
def start(scheme: residua.Scheme) -> str:
    """Compare an untrained stack of eight sublayers with the plain residual, in float64 and after the final norm."""
    torch.manual_seed(0)
    modules = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)).double()
    sublayers = [lambda x, *_, module=module: module(x) for module in modules]  # one input, whatever a read gives
    x = torch.randn(2, 16, 64, dtype=torch.float64)
    ours, plain = (F.rms_norm(one.build(64, 8).double()(x, sublayers), (64,)) for one in (scheme, residua.Residual()))
    difference = ((ours - plain).norm() / plain.norm()).item()
    return "0" if difference == 0 else f"{difference:.0e}" if difference < 0.01 else f"{difference:.2f}"


def told(kind: type) -> dict[str, str]:
    """Return what the docstring of `kind` says of each option that has a line of its own."""
    listed = "|".join(field.name for field in fields(kind)) or "(?!)"
    found = re.findall(rf"(?m)^((?:{listed})(?:, (?:{listed}))*) +(\S.*(?:\n +\S.*)*)", cleandoc(kind.__doc__))
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def options(kind: type) -> str:
    """Return the table of a scheme's options: defaults and choices from its fields, meanings from its docstring."""
    hints = get_type_hints(kind)
    rows = [["option", "default", "values", "meaning"]]
    rows += [[f"`{field.name}`", f"`{field.default!r}`", values(hints[field.name]), escaped(meaning(kind, field.name))]
             for field in fields(kind)]  # fmt: skip
    return table(rows) if len(rows) > 1 else "It has none."


def meaning(kind: type, option: str) -> str:
    """Return what the docstrings say of an option: of `kind`, of a scheme that it names, or of any scheme."""
    text = cleandoc(kind.__doc__)
    named = [getattr(residua, name, None) for name in re.findall(r"`([A-Z]\w+)`", text)]
    for one in (*kind.__mro__, *named, *residua.SCHEMES.values()):
        if isinstance(one, type) and issubclass(one, residua.Scheme) and option in (found := told(one)):
            return found[option]
    for other, words in told(kind).items():
        if re.search(rf"\b{option}\b", words):
            return f"see `{other}`"
    return "see the text above" if re.search(rf"\b{option}\b", text) else ""


def values(declared) -> str:
    if get_origin(declared) is Literal:
        return ", ".join(f"`{choice!r}`" for choice in get_args(declared))
    if get_origin(declared) is Union or type(declared).__name__ == "UnionType":
        return " or ".join(values(part) for part in get_args(declared))
    return "`None`" if declared is type(None) else f"`{declared.__name__}`"


# Tables of other pages with rows for schemes: page, mark, text before the rows, and their columns (all for none).
MEASURED = (
    (
        "resbench-tables.md",
        "resbench",
        "Ours: validation loss of language models of 0.1 and 0.3 million parameters, each scheme tuned under the same "
        "budget, minus that of two tuned baselines. **Bold**: clear after the correction for the number of comparisons "
        "([ResBench](../resbench.md)).",
        ("size", "scheme", "validation loss", "to `residual`, equal tokens", "to `lambdas`, equal tokens", "step time"),
    ),
    (
        "results.md",
        "results",
        "Ours: validation loss of a 0.6M-parameter language model, five seeds ([setting](../results.md)).",
        (),
    ),
    (
        "geometry.md",
        "ours",
        "Ours: mean squared error on the geometric tasks, reduced sizes ([setting](../geometry.md)).",
        (),
    ),
    (
        "retrofit.md",
        "all",
        "Ours: a pretrained model of 135 million parameters with this residual, all weights trained on "
        "([setting](../retrofit.md)).",
        (),
    ),
    ("retrofit.md", "connections", "Ours: the same with frozen weights, only the connections trained.", ()),
)


def measured(name: str, page: str, mark: str, columns: tuple[str, ...]) -> str:
    """Return the rows of a table that are of the scheme `name`; "" for none."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = re.search(rf"<!-- {mark}: .*?-->\n(.*?)\n<!-- /{mark}", text, re.DOTALL)[1].splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    labels = [re.search(r"`([^`]+)`|$", " ".join(row))[1] for row in rows]
    places = [header.index(column) for column in columns] or range(len(header))
    chosen = [row for row, label in zip(rows, labels) if label and scheme_of(label) == name]
    return table([[row[place] for place in places] for row in (header, *chosen)]) if chosen else ""


@cache
def scheme_of(label: str) -> str | None:
    """Return the scheme of a row's label: a preset with options, a label of ResBench or a form of a preset.

    "residual+tc" and "lambdas-gated" are of the preset with which they begin, whatever class computes them.
    """
    own = [preset for preset in residua.PRESETS if re.match(rf"{preset}(?=$|[:+-])", label)]
    entry = studied().get(label)
    if not own and not entry:
        return None
    plain = label.startswith("residual")
    scheme = resolve(entry.connection) if entry and not plain else residua.PRESETS[max(own, key=len)]
    return next(name for name, kind in residua.SCHEMES.items() if type(scheme) is kind)


@cache
def studied():
    return load_study("resbench").schemes


def results(name: str) -> str:
    """Return our rows of the pages with results, then the published averages over the eight tasks."""
    mine = set(presets(name))
    parts = []
    for page, mark, about, columns in MEASURED:
        if rows := measured(name, page, mark, columns):
            parts.append(f"{about}\n\n{rows}")
    averages: dict[str, dict[str, str]] = {}
    for row in ROWS:
        if row.preset in {*mine, "residual"}:
            column = f"{row.size}, {row.num_fewshot}-shot"
            averages.setdefault(row.preset, {})[column] = f"{row.average:.2f} (v{row.version})"
    if mine & averages.keys():
        columns = list(averages["residual"])
        rows = [[f"`{preset}`", *(found.get(column, "") for column in columns)] for preset, found in averages.items()]
        parts.append(
            "Published: mean accuracy of eight tasks in percent, one seed each, with the version of arXiv 2601.00417. "
            "Small and medium models have 124M and 353M parameters.\n\n" + table([["scheme", *columns], *rows])
        )
    if name in ("edelta", "jpmhc", "mhc", "pooled_householder"):
        parts.append("[Geometry](../geometry.md) has the rows published in arXiv 2605.06729.")
    return "\n\n".join(parts) or "We have not trained it in a comparison yet."


def joined(paragraph: str) -> str:
    """Join the lines of a paragraph, link the pages that it names, and leave an indented one as it is."""
    linked = re.sub(r"docs/(\w+)\.md", lambda match: f"[{match[1]}](../{match[1]}.md)", paragraph)
    return paragraph if paragraph.startswith("    ") else " ".join(linked.split())


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
