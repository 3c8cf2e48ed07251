"""The README and docs/ keep their promises: Python runs, commands work, links lead somewhere, tables are true."""

import importlib
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import residua
import residua.demo
from residua.cli import main
from residua.runs.folder import flatten
from residua.runs.statistics import paired
from residua.study.plan import load_study
from residua.study.results import results
from residua.training import load_config
from support.pages import blocks
from support.variants import ALL

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
PAGES |= {f"docs/{path.name}": path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scheme_pages():
    """The module that generates the pages of schemes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module("scheme_pages")


@pytest.fixture(scope="module")
def hooks(scheme_pages):
    """The module that adds pages to the site."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module("hooks")


def commands() -> list[list[str]]:
    """The commands in the `sh` blocks of all pages, each once; a page comes after the pages that make its runs."""
    order = ["README.md", "docs/language-models.md", *PAGES]
    lines = "\n".join(block for page in order for block in blocks(PAGES[page], "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in dict.fromkeys(lines) if line.strip()]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[] if name == "README.md" else pytest.mark.slow)
        for name, text in PAGES.items()
        if blocks(text, "python")
    ],
)
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path):
    """One block after the other in one namespace, as a reader would paste them; only what is theirs is provided."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    theirs = {"x": torch.randn(8, 16, 64), "attention": nn.Linear(64, 64), "norm": nn.RMSNorm(64)}
    namespace = theirs if page == "README.md" else {}
    for block in blocks(PAGES[page], "python"):
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.processes
@pytest.mark.timeout(900)  # every command of every page, one after the other
def test_the_commands_run(monkeypatch, tmp_path, capsys):
    """`make` is checked against the Makefile; every residua command runs, training for a few steps only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, recipe in residua.demo.RECIPES.items():
        tiny = tmp_path / f"{name}.yaml"
        tiny.write_text(load_config(recipe, [*TINY, "--data.path=data"]).to_yaml(), encoding="utf-8")
        monkeypatch.setitem(residua.demo.RECIPES, name, str(tiny))
    seen = set()
    for command in commands():
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", MAKEFILE, re.MULTILINE), command
        elif command[0] == "residua":
            status = main([*command[1:], *shortened(command)])
            assert status == 0, (command, capsys.readouterr().err)
            seen.add(command[1])
        else:
            assert command[:2] == ["pip", "install"], command
    expected = {"schemes", "prepare", "train", "evaluate", "generate", "compare", "demo", "bench", "estimate"}
    assert expected | {"export", "sweep", "analyze", "explore", "geometry"} <= seen


TINY = [
    "--model.num_hidden_layers=1",
    "--model.hidden_size=32",
    "--model.num_attention_heads=1",
    "--train.batch_size=2",
]


def shortened(command: list[str]) -> list[str]:
    """The options that make a command quick enough for a test."""
    match command[1]:
        case "demo":
            return ["--steps", "2"]
        case "geometry" if "sizes" not in command:
            return ["--steps", "4", "--seeds", "42", "--workers", "1"]
        case "estimate":
            return ["--model.num_hidden_layers", "2"]
        case "sweep" | "train" if "--resume" not in command:
            return ["--train.steps", "4", "--train.warmup_steps", "1", *TINY]
        case "bench":
            shape = ["--layers", "1", "--dim", "32", "--heads", "2", "--head-dim", "16", "--vocab-size", "64"]
            return [*shape, "--rounds", "1", "--sequence-length", "16", "--warmup", "0"]
    return []


def test_the_commands_that_need_more_than_a_laptop_exist(capsys):
    """In `console` blocks: they do not run, but their own help knows every command and option."""
    lines = [line for text in PAGES.values() for block in blocks(text, "console") for line in block.splitlines()]
    assert len(lines) >= 3
    for line in (shlex.split(line, comments=True) for line in dict.fromkeys(lines)):
        command = line[line.index("residua") + 1 :]
        assert main([command[0], "--help"]) == 0
        told = capsys.readouterr().out
        assert {option for option in command if option.startswith("--")} <= set(re.findall(r"--[\w.-]+", told)), line


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """To a file of the repository, or to a page that the site generates; an anchor is a heading of its page."""
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists() or (page, path) in GENERATED, target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


GENERATED = {("docs/own-model.md", "examples.md"), ("docs/testing.md", "examples.md")}


@pytest.mark.parametrize("page", ["docs/deviations.md", "docs/equations.md"])
def test_the_options_that_a_page_names_exist(page):
    """`name="value"` or `name=value` in code spans: an option of a scheme or of ResiduaConfig, and a value that it
    takes beside the options of some variant."""
    from residua.models import ResiduaConfig

    for span in re.findall(r"`([^`]*)`", PAGES[page]):
        for name, value in re.findall(r"\b([a-z_]+)=(\"[a-z0-9_]+\"|\d[\d.]*|True|False)", span):
            options = {name: eval(value)}
            takers = [scheme for scheme in ALL.values() if name in scheme.__dataclass_fields__]
            assert not takers or any(takes(scheme, options) for scheme in takers), span
            if not takers:
                ResiduaConfig(**options)


def takes(scheme, options) -> bool:
    try:
        replace(scheme, **options)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.slow
def test_the_schemes_are_listed_with_their_state_and_their_parameters(scheme_pages):
    """The parameters that a scheme adds to the plain residual at the paper's two sizes, counted on the whole model."""
    from residua import PRESETS
    from residua.estimate import parameters
    from residua.models import SIZES, ResiduaConfig

    pattern = r"^\| `([a-z-]+)` \| .* \| (d|\d+d|\d*d to \d+d) \| ([\d,]+)(?: / ([\d,]+))? \|$"
    rows = re.findall(pattern, PAGES["docs/schemes.md"], flags=re.MULTILINE)
    assert [name for name, *_ in rows] == list(PRESETS)
    sizes = [SIZES[name] for name in ("small", "medium")]
    totals = {name: [parameters(ResiduaConfig(connection=name, **size))["total"] for size in sizes] for name in PRESETS}
    for name, state, small, medium in rows:
        assert state == scheme_pages.state(PRESETS[name])
        told = [int(count.replace(",", "")) for count in (small, medium or small)]
        assert told == [total - plain for total, plain in zip(totals[name], totals["residual"])], name


@pytest.mark.parametrize("name", residua.SCHEMES)
def test_the_page_of_a_scheme_is_whole(name, scheme_pages):
    """Its code runs and prints, every preset has a row, and every option a meaning."""
    page = scheme_pages.page(name)
    assert residua.SCHEMES[name].equation in page
    assert "torch.Size([2, 16, 64])" in page
    for preset, scheme in residua.PRESETS.items():
        assert (f"\n| `{preset}` | " in page) or type(scheme) is not residua.SCHEMES[name]
    for field in fields(residua.SCHEMES[name]):
        assert scheme_pages.meaning(residua.SCHEMES[name], field.name), field.name


def test_the_start_of_a_scheme_is_measured(scheme_pages):
    assert scheme_pages.start(residua.PRESETS["residual"]) == "0"
    assert float(scheme_pages.start(residua.PRESETS["hc"])) < 1e-6
    assert float(scheme_pages.start(residua.PRESETS["ddl"])) > 0.1


def test_the_site_has_every_page_in_its_navigation():
    told = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w-]+\.md)$", told, flags=re.MULTILINE))
    assert listed == {path.name for path in DOCS.glob("*.md")} | {"index.md", "examples.md"}


def test_the_home_page_and_the_copies_of_the_site(hooks):
    home = hooks.home()
    assert "](docs/" not in home
    assert "](results.md)" in home
    assert {"CITATION.cff", "experiments/LOG.md"} <= hooks.outside()
    for name in hooks.EXAMPLES:
        assert (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()[-1] in hooks.examples()


def test_the_api_page_names_what_exists():
    from pkgutil import resolve_name

    names = re.findall(r"^::: ([\w.]+)$", PAGES["docs/api.md"], flags=re.MULTILINE)
    assert len(names) > 10
    for name in names:
        resolve_name(name)


@pytest.mark.slow
def test_the_tables_agree_with_the_records():
    done = subprocess.run([sys.executable, ROOT / "experiments/tables.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def runs(name: str) -> list[dict]:
    """The records of a file in experiments/."""
    return [json.loads(line) for line in (ROOT / "experiments" / name).read_text(encoding="utf-8").splitlines()]


def test_the_network_without_layers_is_ahead_where_the_pages_say_so():
    """Of every scheme, with any seeds of both, but for `mhc` on rotations in every plane."""
    losses = {}
    for run in runs("geometry/quick/records.jsonl"):
        if run["kind"] == "run":
            losses.setdefault(run["task"], {}).setdefault(run["model"], []).append(run["loss"])
    level = {}
    for task in ("stability", "near-pi", "near-pi-multi"):
        without = losses[task].pop("zero-layer")
        level[task] = {name for name, found in losses[task].items() if min(found) <= max(without)}
    assert level == {"stability": set(), "near-pi": set(), "near-pi-multi": {"mhc"}}


def deviations() -> dict[int, str]:
    return {int(number): row for number, row in re.findall(r"^\| (\d+) \| (.*) \|$", PAGES["docs/deviations.md"], re.M)}


def test_the_rows_of_the_deviations_are_numbered_in_order():
    numbers = re.findall(r"^\| (\d+) \|", PAGES["docs/deviations.md"], flags=re.MULTILINE)
    assert len(numbers) > 50
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))


def test_the_cited_rows_of_the_deviations_are_the_right_ones():
    ((first, last),) = re.findall(r"\(deviations\.md\), rows (\d+) to (\d+)", PAGES["docs/geometry.md"])
    cited = [deviations()[number].split(" | ")[:2] for number in range(int(first), int(last) + 1)]
    assert cited == [["EDelta", "initial gate"], ["EDelta", "initial rotation"], ["EDelta", "H_pre, H_post"]]


def test_what_is_said_of_resbench_is_what_its_records_say():
    """The sentences of README.md, docs/results.md and docs/resbench.md; a record that says otherwise ends them."""
    found = results(load_study("resbench"), runs("resbench/records.jsonl"), runs("resbench/costs.jsonl"))
    whole = [one for one in found.rows if one.whole]
    shapes = "0.1M", "0.1M-wide", "0.1M-deep"
    assert {one.rung for one in whole} == {*shapes}
    with_muon = {one.scheme: one for one in whole if one.scheme.endswith("-muon")}
    row, wide, deep = (
        {one.scheme: one for one in whole if one.rung == rung and one.scheme not in with_muon} for rung in shapes
    )

    def ends(estimate):
        return estimate.mean - estimate.half_width, estimate.mean + estimate.half_width

    def difference(ours, theirs):
        return ends(paired(ours, theirs))

    def interval(name, baseline, measure, rows=row):
        return ends(rows[name].difference(baseline, measure).estimate)

    rates = {"ddl": {}, "ddl-write-only": {}}
    for name, losses in rates.items():
        for one in runs(f"resbench/rates/{name}.jsonl"):
            losses.setdefault(one["point"]["train.lr"], {})[one["seed"]] = one["val_loss"]
    for rate in (0.032, 0.064):
        assert difference(rates["ddl"][rate], rates["ddl-write-only"][rate])[0] > 0
    assert difference(rates["ddl"][0.064], rates["ddl"][0.032])[0] > 0
    low, high = difference(rates["ddl-write-only"][0.064], rates["ddl-write-only"][0.032])
    assert low < 0 < high

    measures, baselines = ("tokens", "FLOPs", "seconds", "compiled seconds"), ("residual", "lambdas")
    for name, baseline, measure, rows in itertools.product(
        ("residual+tc", "lambdas+conv", "lambdas-gated+conv"), baselines, measures, (row, wide)
    ):
        assert interval(name, baseline, measure, rows)[1] < 0, (name, baseline, measure)
    for baseline, measure, rows in itertools.product(baselines, measures, (row, wide, deep)):
        found_there = {name: one.difference(baseline, measure) for name, one in rows.items()}
        first = min((one.estimate.mean, name) for name, one in found_there.items() if one and one.estimate)[1]
        assert first.startswith("ddl-tc") or first.endswith(("+tc", "+conv")), (first, baseline, measure)
        if rows is deep and (baseline, measure) == ("lambdas", "seconds"):
            low, high = interval("residual+tc", baseline, measure, deep)
            assert low < 0 < high
        else:
            assert interval("residual+tc", baseline, measure, rows)[1] < 0
        if (one := found_there["lambdas+tc"]) or measure != "compiled seconds":
            assert ends(one.estimate)[1] < 0
        if rows is deep and measure in ("tokens", "FLOPs"):
            assert interval("lambdas-gated+conv", baseline, measure, deep)[1] < 0
    for measure in measures:
        assert interval("lambdas", "residual", measure, deep)[1] < 0
    level = deep["lambdas-gated+conv"].difference("lambdas", "seconds").estimate
    assert ends(level)[0] < 0 < ends(level)[1]
    assert round(level.detectable, 3) == 0.023
    for rows in (row, wide):
        low, high = difference(rows["lambdas+tc"].losses, rows["residual+tc"].losses)
        assert low < 0 < high
    assert difference(deep["lambdas+tc"].losses, deep["residual+tc"].losses)[1] < 0
    assert min(row.values(), key=lambda one: one.loss.mean) is row["lambdas-gated+tc"]
    gated, others = deep["lambdas-gated+tc"], [one for name, one in deep.items() if name != "lambdas-gated+tc"]
    last = {seed: loss - min(one.losses[seed] for one in others) for seed, loss in gated.losses.items()}
    assert sorted(loss < 0 for loss in last.values()) == [False, True, True, True, True]
    (jumped,) = (run for run in gated.runs if run["kind"] == "report" and last[run["seed"]] > 0)
    jump = next(later[0] for (_, loss), later in itertools.pairwise(jumped["curve"]) if later[1] > loss + 1)
    assert jump <= jumped["steps"] / 2 + 1
    assert all(
        interval("lambdas-gated+tc", baseline, measure, deep)[0]
        < 0
        < interval("lambdas-gated+tc", baseline, measure, deep)[1]
        for baseline, measure in itertools.product(baselines, measures)
    )
    assert interval("ddl-tc", "lambdas", "compiled seconds", deep)[0] > 0
    assert interval("ddl-tc", "residual", "compiled seconds", deep)[1] > 0
    assert round(deep["ddl-tc"].cost["time_ratio"]["median"], 2) == 1.76
    timed = [
        round(cost["time_ratio"]["median"], 2)
        for cost in runs("resbench/costs.jsonl")
        if (cost["rung"], cost["scheme"], cost.get("compiled", False)) == ("0.1M", "residual+tc", False)
    ]
    assert timed == [1.11, 1.08, 1.16]
    low, high = difference(wide["residual+tc"].losses, wide["residual+conv"].losses)
    assert low < 0 < high
    assert difference(row["residual+tc"].losses, row["residual+conv"].losses)[1] < 0
    assert wide["residual+conv"].cost["time_ratio"]["median"] < wide["residual+tc"].cost["time_ratio"]["median"]
    for baseline, rows in itertools.product(baselines, (row, wide)):
        assert interval("ddl-tc", baseline, "tokens", rows)[1] < 0
        assert interval("ddl-tc", baseline, "compiled seconds", rows)[1] < 0
        low, high = interval("gated-orthogonal", baseline, "tokens", rows)
        assert low < 0 < high
    ratios = []
    for name, rows in itertools.product(("ddl-ec", "ddl-tc"), (row, wide)):
        assert all(interval(name, baseline, "seconds", rows)[1] > 0 for baseline in baselines)
        assert interval(name, "residual", "compiled seconds", rows)[1] < 0
        ratios.append(round(rows[name].cost["time_ratio"]["median"], 2))
        assert rows["residual+tc"].cost["time_ratio"]["median"] < ratios[-1]
    assert (min(ratios), max(ratios)) == (1.39, 1.48)
    given = {(answer.rung, answer.scheme, answer.to, answer.measure): answer for answer in found.answers}
    for pair, verdict in (
        (("ddl-tc", "ddl-tc-write-only"), "no difference seen"),
        (("ddl", "ddl-write-only"), "behind"),
        (("ddl-tc", "residual+tc"), "ahead"),
        (("gated-delta+tc", "residual+tc"), "no difference seen"),
        (("lambdas-gated+conv", "lambdas+conv"), "ahead by its interval"),
    ):
        answer = given[("0.1M-wide", *pair, "tokens")]
        assert answer.verdict.startswith(verdict), pair
    assert given["0.1M-wide", "ddl-tc", "residual+tc", "tokens"].difference.clear
    for pair, verdict in (
        (("ddl-tc", "ddl-tc-write-only"), "no difference seen"),
        (("ddl-tc", "residual+tc"), "behind"),
        (("lambdas-gated+conv", "lambdas+conv"), "ahead"),
    ):
        assert given[("0.1M-deep", *pair, "tokens")].verdict.startswith(verdict), pair
    seen = [given[rung, "ddl-tc", "ddl-tc-write-only", "tokens"].difference.estimate.detectable for rung in shapes]
    assert [round(value, 3) for value in seen] == [0.018, 0.040, 0.036]
    assert -given["0.1M-wide", "ddl-tc", "residual+tc", "tokens"].difference.estimate.mean < seen[1]
    for rows, baseline in itertools.product((row, wide, deep), baselines):
        clear = [rows["lambdas+tc"].difference(baseline, measure).clear for measure in ("tokens", "FLOPs", "seconds")]
        assert all(clear) == (rows is wide)
    answers = {tuple(pair): answer for (rung, *pair), answer in given.items() if rung == "0.1M"}
    for name in ("residual+tc-muon", "lambdas-gated+tc-muon", "ddl-tc-muon"):
        verdict = answers[name, "residual-muon", "tokens"].verdict
        assert verdict == "ahead by its interval, but not after the correction"
    for pair in (("gated-orthogonal-muon", "residual-muon"), ("ddl-tc-muon", "residual+tc-muon")):
        assert answers[(*pair, "tokens")].verdict.startswith("no difference seen")
    assert interval("mhc", "residual", "tokens")[1] < 0
    assert interval("mhc", "lambdas", "tokens")[0] < 0 < interval("mhc", "lambdas", "tokens")[1]
    assert round(row["mhc"].cost["time_ratio"]["median"], 2) == 1.97
    gains = [one.difference("residual", "tokens").estimate.mean for name, one in row.items() if name != "residual"]
    muon = with_muon["residual-muon"].difference("residual", "tokens").estimate.mean
    assert sum(gain > muon for gain in gains) > len(gains) / 2
    for pair, verdict, seeds in (
        (("ddl", "ddl-write-only"), "behind", 10),
        (("gated-delta-write", "gated-delta-write-only"), "behind", 10),
        (("gated-delta", "residual"), "no difference seen", 10),
        (("gated-delta-positive", "residual"), "no difference seen", 10),
        (("ddl-tc", "ddl-tc-write-only"), "no difference seen", 5),
        (("ddl-tc", "residual+tc"), "no difference seen", 5),
        (("gated-delta+tc", "residual+tc"), "behind", 5),
        (("lambdas-gated+conv", "lambdas+conv"), "no difference seen", 5),
    ):
        answer = answers[(*pair, "tokens")]
        assert (answer.verdict.startswith(verdict), answer.difference.estimate.count) == (True, seeds), pair

    losses = {}  # by scheme, point and kind: of the schemes whose two best points were trained with all seeds
    for one in runs("resbench/records.jsonl"):
        own = row.get(one["scheme"]) if one["rung"] == "0.1M" else None
        if own and (one["kind"] != "report" or one["seed"] in own.losses):
            points = losses.setdefault(one["scheme"], {})
            points.setdefault(json.dumps(one["point"]), {}).setdefault(one["kind"], {})[one["seed"]] = one["val_loss"]
    both = {
        name: [kinds for kinds in points.values() if len(kinds.get("report", ())) == 5]
        for name, points in losses.items()
    }
    both = {name: points for name, points in both.items() if len(points) > 1}
    choices = {
        "short": lambda kinds: kinds["tune"][0],
        "one": lambda kinds: kinds["final"][0],
        "three": lambda kinds: statistics.fmean(kinds["final"].values()),
    }
    lost = {how: [] for how in choices}
    for (how, choice), points in itertools.product(choices.items(), both.values()):
        means = [statistics.fmean(kinds["report"].values()) for kinds in points]
        chosen = min(range(len(points)), key=lambda i: choice(points[i]))
        lost[how].append(means[chosen] - min(means))
    assert {how: sum(loss > 0 for loss in found) for how, found in lost.items()} == {"short": 6, "one": 4, "three": 3}
    assert len(both) == 10
    assert 0.029 < max(lost["one"]) < 0.0305
    assert 0.014 < max(lost["three"]) < 0.0155
    (audited,) = (
        one["points"]
        for one in runs("resbench/audits.jsonl")
        if (one["rung"], one["scheme"], one.get("seed")) == ("0.1M-deep", "lambdas-gated+tc", jumped["seed"])
    )
    stuck = {one["step"]: sum(sub["gate_q05"] > 0.99 for sub in one["sublayers"]) for one in audited}
    assert stuck[jump] == 8 == len(audited[0]["sublayers"]) / 2
    assert all(count <= 1 for step, count in stuck.items() if step < jump)
    assert stuck[jumped["steps"]] == 3
    (other,) = (
        one["points"]
        for one in runs("resbench/audits.jsonl")
        if (one["rung"], one["scheme"], one.get("seed")) == ("0.1M-deep", "lambdas-gated+tc", 1)
    )
    assert max(sum(sub["gate_q05"] > 0.99 for sub in one["sublayers"]) for one in other) == 1
    audits = {one["scheme"]: one["points"][-1] for one in found.with_audits(runs("resbench/audits.jsonl")).audits}
    gates = {name: audits[name]["sublayers"] for name in ("gated-orthogonal", "lambdas-gated")}
    assert sum(one["gate_q50"] < -0.98 for one in gates["gated-orthogonal"]) == 5
    assert sum(one["gate_q50"] < 0 for one in gates["lambdas-gated"]) == 4
    mlp, *others = sorted(audits["ddl-tc"]["sublayers"], key=lambda one: -one["reflection"])
    assert mlp["sublayer"] == "1 mlp"
    assert 0.15 < mlp["reflection"] < 0.2
    assert all(one["reflection"] < 0.01 for one in others)
    assert all(0.3 < one["beta_q50"] < 1.3 for one in audits["ddl"]["sublayers"])
    assert statistics.fmean(one["reflection"] for one in audits["ddl"]["sublayers"]) < 0.05
    point = {one["key"]: one["point"]["train.lr"] for one in runs("resbench/records.jsonl")}
    (fast,) = (one for one in runs("resbench/audits.jsonl") if (one["scheme"], point[one["key"]]) == ("ddl", 0.064))
    gates = fast["points"][-1]["sublayers"]
    assert gates[1]["beta_q05"] > 1.5
    assert gates[6]["beta_q95"] < 0.1


def test_the_demo_has_the_settings_that_resbench_found_and_its_page_says_what_came_out():
    found = results(load_study("resbench"), runs("resbench/records.jsonl"), ())
    rows = {row.scheme: row for row in found.rows if row.rung == "0.1M"}
    steps = {one["steps"] for one in runs("resbench/records.jsonl") if (one["rung"], one["kind"]) == ("0.1M", "report")}
    for name, scheme in (("residual", "residual"), ("ddl-tc", "ddl-tc"), ("residual-tc", "residual+tc")):
        config = load_config(residua.demo.RECIPES[name])
        keys = flatten(asdict(config))
        assert {key: keys[key] for key in rows[scheme].point} == rows[scheme].point, name
        assert {config.train.steps} == steps

    demo = json.loads((ROOT / "experiments" / "demo.json").read_text())
    losses = {group["name"]: group["val_loss"]["mean"] for group in demo["groups"]}
    assert losses["ddl-tc"] < losses["residual:compress=token"] < losses["residual"]
    (tokens,) = {group["tokens"] for group in demo["groups"]}
    assert round(tokens / demo["facts"]["data"]["train_tokens"], 1) == 3.6


def test_the_limits_of_the_reproduction_agree_with_its_records():
    """Which rows were tuned over the initial scale, and what the sweep of the demo says of the others."""
    tried = {}
    for run in runs("reproduction.jsonl"):
        tried.setdefault(run["variant"], set()).add(run["embedding_init_std"])
    assert tried.pop("residual") == {0.06, 0.12, 0.24}
    assert set(map(tuple, tried.values())) == {(0.12,)}

    losses = {}
    for run in runs("tune-tiny.jsonl"):
        place = run["scheme"], run["embedding_init_std"], run["hidden_init_std_factor"]
        losses.setdefault(place, {}).setdefault(run["lr"], []).append(run["val_loss"])
    best = {
        place: min(statistics.mean(found) for found in rates.values() if len(found) == 3)
        for place, rates in losses.items()
        if any(len(found) == 3 for found in rates.values())
    }
    told = PAGES["docs/results.md"]
    for own, shared in ((("ddl", 0.06, 0.5), ("ddl", 0.12, 0.5)), (("ddl-cc-ec", 0.12, 1.0), ("ddl-cc-ec", 0.12, 0.5))):
        assert best[own] == min(loss for place, loss in best.items() if place[0] == own[0])
        assert re.search(rf"\({best[own]:.3f}\b[^)]*\b{best[shared]:.3f}\b[^)]*\)", told), own
