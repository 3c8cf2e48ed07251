"""The page of a scheme, generated from its class: equation, code that runs, start, cost, options, results, users."""

import io
import re
import textwrap
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from formulas import displayed
from torch import nn

import residua
from residua.connections import PRESETS, SCHEMES, resolve
from residua.connections.explained import about, added, meaning, state, values
from residua.lab.evaluation.published import averages
from residua.lab.study.report import difference_text, estimate_text
from residua.lab.study.results import Results, read_results

DOCS = Path(__file__).parent

# Options for the code of a page, whose sublayers take one input.
WITH = {"mudd": 'ways="r"'}


FAMILIES = {
    "Scales": ("residual", "lambdas", "siamese"),
    "Delta writes": ("deep_delta", "gated_delta", "gated_orthogonal"),
    "Streams": ("hyper", "frac", "mhc", "mhc_deepseek", "krom", "ihc", "gated_residual", "wide", "altup"),
    "Rotations": ("jpmhc", "edelta", "edelta_stream", "pooled_householder"),
    "Depth": ("attnres", "attnres_inkling", "delta_attnres", "denseformer", "mudd"),
}


PICTURES = {
    "Scales": "scales",
    "Delta writes": "delta-writes",
    "Streams": "streams",
    "Rotations": "rotations-and-reflections",
    "Depth": "attention-over-depth",
}
SECTIONS = {"edelta_stream": "edelta"}
"""The schemes whose differences stand in the section of another."""


def names() -> list[str]:
    """Return the names of all schemes."""
    return list(SCHEMES)


def families() -> dict[str, list[str]]:
    """Return the names of the schemes by family; those that are in none of FAMILIES are under "More"."""
    listed = {name for family in FAMILIES.values() for name in family}
    more = [name for name in SCHEMES if name not in listed]
    return {family: list(members) for family, members in FAMILIES.items()} | ({"More": more} if more else {})


def family_of(name: str) -> str:
    return next(family for family, members in families().items() if name in members)


def title(name: str) -> str:
    return SCHEMES[name].title


def presets(name: str) -> dict[str, residua.Scheme]:
    return {preset: scheme for preset, scheme in PRESETS.items() if type(scheme) is SCHEMES[name]}


def page(name: str) -> str:
    """Return the Markdown of the page of the scheme with this name."""
    kind = SCHEMES[name]
    code = snippet(name)
    parts = [
        heading(name),
        displayed(kind.equation),
        f"Source: {sources(name)}. Class: `residua.{kind.__name__}`. {picture(name)}",
        *map(joined, about(kind)),
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
        linked(kind.users),
        "## Where papers and code differ",
        differences(name),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(name: str) -> str:
    """Return the heading of a scheme's page, with its name if only other titles have that: so a search finds it."""
    elsewhere = any(name in title(other).lower() for other in SCHEMES if other != name)
    if not elsewhere or name in title(name).lower():
        return f"# {title(name)}"
    return f"---\nsearch: {{boost: 4}}\n---\n\n# {title(name)} ({name})"


def picture(name: str) -> str:
    """Return the link to the picture of a scheme's family."""
    anchor = PICTURES.get(family_of(name))
    return f"[Its family in a picture](../pictures.md#{anchor})." if anchor else ""


def differences(name: str) -> str:
    """Return the section of docs/deviations.md about a scheme, its rows as a list that a phone can show."""
    listed = listing(sections().get(title(SECTIONS.get(name, name)), ""))
    general = "[Where papers and code differ](../deviations.md) has the points that hold for all schemes."
    return "\n\n".join([*([rebased(listed)] if listed else []), general])


def listing(section: str) -> str:
    """Return a section of docs/deviations.md with its table as a list."""
    rows = re.findall(r"^\| (.*) \|$", section, flags=re.MULTILINE)
    heads = next((row.split(" | ") for row in rows if row.startswith("#")), [])
    items = [dict(zip(heads, row.split(" | "))) for row in rows if re.match(r"\d", row)]
    text = re.sub(r"(?m)^\|.*\n?", "", section).strip()
    return "\n\n".join(part for part in (text, "\n".join(map(point, items))) if part)


def point(row: dict[str, str]) -> str:
    """Return one row as an item: number, topic, our choice, the sources, the option."""
    labels = {"paper": "Paper", "authors' code": "Authors' code", "comparison code": "Comparison code"}
    labels |= {"public code": "Public code", "their code": "Their code", "option": "Option"}
    others = [f"*{label}*: {row[key]}." for key, label in labels.items() if row.get(key, "-") != "-"]
    return f"- **{row['#']}. {row['topic']}**: {row['ours, by default']}. {' '.join(others)}"


@cache
def sections() -> dict[str, str]:
    """Return the sections of docs/deviations.md by heading."""
    text = (DOCS / "deviations.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def index() -> str:
    """Return docs/deviations.md for the site: the sections of schemes are links to their pages."""
    text = (DOCS / "deviations.md").read_text(encoding="utf-8")
    listed = []
    for name in names():
        count = len(re.findall(r"^\| \d+ \|", sections().get(title(name), ""), flags=re.MULTILINE))
        if title(name) in sections():
            text = text.replace(f"## {title(name)}{sections()[title(name)]}", "")
            points = f"{count} {'point' if count == 1 else 'points'}" if count else "in words"
            listed.append(f"- [{title(name)}](schemes/{name}.md#where-papers-and-code-differ): {points}")
    for heading in sections().keys() - set(map(title, names())):
        text = text.replace(sections()[heading], f"\n\n{listing(sections()[heading])}\n\n")
    return f"{text.strip()}\n\n## By scheme\n\n" + "\n".join(listed) + "\n"


def rebased(text: str) -> str:
    """Point the links of a page in docs/ from docs/schemes/."""
    return re.sub(r"\]\((?!\w+:|#)", "](../", text)


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
    kind = SCHEMES[name].__name__
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
    kind = SCHEMES[name]
    default = kind()
    for preset, scheme in presets(name).items():
        changed = {
            field.name: getattr(scheme, field.name) for field in fields(scheme) if field.name not in kind.derived
        }
        listed = [f"`{option}={value!r}`" for option, value in changed.items() if value != getattr(default, option)]
        counts = [f"{count:+,}" for count in added(scheme).values()]
        rows.append([f"`{preset}`", " ".join(listed), state(scheme), *counts, start(scheme)])
    return table(rows)


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


def options(kind: type) -> str:
    """Return the table of a scheme's options: defaults and choices from its fields, meanings from its docstring."""
    rows = [["option", "default", "values", "meaning"]]
    for field in fields(kind):
        choices, text = escaped(values(kind, field.name)), escaped(meaning(kind, field.name))
        rows.append([f"`{field.name}`", f"`{field.default!r}`", choices, text])
    return table(rows) if len(rows) > 1 else "It has none."


COMPARED = (
    "Ours: validation loss of language models of 0.1 and 0.3 million parameters, each tuned under the same budget, "
    "minus that of two tuned baselines. **Bold**: clear after the correction for the number of comparisons "
    "([ResBench](../resbench.md))."
)
# Tables of other pages with rows for schemes: page, mark, and text before the rows.
MEASURED = (
    (
        "reproduce.md",
        "results",
        "Ours: validation loss of a 0.6M-parameter language model, five seeds ([setting](../reproduce.md)).",
    ),
    (
        "geometry.md",
        "ours",
        "Ours: mean squared error on the geometric tasks, reduced sizes ([setting](../geometry.md)).",
    ),
    (
        "retrofit.md",
        "all",
        "Ours: a pretrained model of 135 million parameters with this residual, all weights trained on "
        "([setting](../retrofit.md)).",
    ),
    ("retrofit.md", "connections", "Ours: the same with frozen weights, only the connections trained."),
)


def compared(name: str) -> str:
    """Return the finished rows of ResBench that are of the scheme `name`; "" for none."""
    baselines = resbench().study.baselines
    header = ["size", "scheme", "validation loss", *(f"to `{one}`, equal tokens" for one in baselines), "step time"]
    rows = [[size, f"`{label}`", *cells] for size, label, *cells in compared_rows(name)]
    return table([header, *rows]) if rows else ""


def compared_rows(name: str) -> list[list[str]]:
    """Return size, label, loss, differences from the baselines and step time of these rows."""
    rows = []
    for row in resbench().rows:
        if row.whole and row.loss and scheme_of(row.scheme) == name:
            differences = [difference_text(row, one, "tokens") for one in resbench().study.baselines]
            time = f"{row.cost.ratio.median:.2f}" if row.cost else "–"
            rows.append([row.size, row.scheme, estimate_text(row.loss, ".4f"), *differences, time])
    return rows


def measured(name: str, page: str, mark: str) -> str:
    """Return the rows of a table that are of the scheme `name`; "" for none."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = re.search(rf"<!-- {mark}: .*?-->\n(.*?)\n<!-- /{mark}", text, re.DOTALL)[1].splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    labels = [re.search(r"`([^`]+)`|$", " ".join(row))[1] for row in rows]
    chosen = [row for row, label in zip(rows, labels) if label and scheme_of(label) == name]
    return table([header, *chosen]) if chosen else ""


@cache
def scheme_of(label: str) -> str | None:
    """Return the scheme of a row's label: a preset with options, a label of ResBench or a form of a preset.

    "residual+tc" and "lambdas-gated" are of the preset with which they begin, whatever class computes them.
    """
    own = [preset for preset in PRESETS if re.match(rf"{preset}(?=$|[:+-])", label)]
    entry = resbench().study.schemes.get(label)
    if not own and not entry:
        return None
    plain = label.startswith("residual")
    scheme = resolve(entry.connection) if entry and not plain else PRESETS[max(own, key=len)]
    return next(name for name, kind in SCHEMES.items() if type(scheme) is kind)


@cache
def resbench() -> Results:
    return read_results(DOCS.parent / "resbench" / "records" / "main")


def results(name: str) -> str:
    """Return our rows of the pages with results, then the published averages over the eight tasks."""
    mine = set(presets(name))
    tables = [(COMPARED, compared(name)), *((about, measured(name, page, mark)) for page, mark, about in MEASURED)]
    parts = [f"{about}\n\n{rows}" for about, rows in tables if rows]
    header, rows = averages(mine)
    if rows:
        parts.append(
            "Published: mean accuracy of eight tasks in percent, one seed each, with the version of arXiv 2601.00417. "
            "Small and medium models have 124M and 353M parameters.\n\n"
            + table([header, *([f"`{preset}`", *row] for preset, *row in rows)])
        )
    if name in ("edelta", "jpmhc", "mhc", "pooled_householder"):
        parts.append("[Geometry](../geometry.md) has the rows published in arXiv 2605.06729.")
    return "\n\n".join(parts) or "We have not trained it in a comparison yet."


def linked(text: str) -> str:
    """Link the names of schemes in a text to their pages."""
    return re.sub(rf"`({'|'.join(names())})`", r"[\1](\1.md)", text)


def joined(paragraph: str) -> str:
    """Join the lines of a paragraph, link the pages that it names, and leave an indented one as it is."""
    linked = re.sub(r"docs/(\w+)\.md", lambda match: f"[{match[1]}](../{match[1]}.md)", paragraph)
    return paragraph if paragraph.startswith("    ") else " ".join(linked.split())


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
