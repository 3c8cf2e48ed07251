"""What the view Compare shows of runs, in a real browser, and what it is given to show."""

import json
from pathlib import Path

import pytest

pytest.importorskip("plotly")
pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from residua.lab.evaluation.compare import compare
from residua.lab.evaluation.plots import _styles
from residua.lab.explorer.collect import page_of
from residua.lab.explorer.comparison import comparison_payload
from residua.lab.explorer.page import write_page
from support.browser import go_to
from support.planted_runs import planted_run
from support.waiting import until


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        planted_run(folder / "plain-0", "residual"),
        planted_run(folder / "plain-1", "residual", 1),
        planted_run(folder / "ddl-0", "ddl", offset=-0.2, seconds_per_step=0.6),
        planted_run(folder / "ddl-1", "ddl", 1, offset=-0.24, seconds_per_step=0.6),
        planted_run(folder / "twin", "residual", lr=2e-3),
    ]


@pytest.fixture(scope="module")
def page_file(runs, tmp_path_factory) -> Path:
    return write_page(tmp_path_factory.mktemp("compare") / "page.html", *page_of([], comparison_payload(runs)))


@pytest.fixture(scope="module")
def one_page(open_shared_page, page_file):
    return open_shared_page(page_file, "view=compare")


def drawn(page, baseline, axis="step"):
    page.wait_for_selector(f'[data-drawn="{baseline} {axis}"]', state="attached", timeout=250_000)


def lines(page, plot):
    script = """name => JSON.stringify(document.querySelector(`[data-plot="${name}"]`).data)"""
    found = json.loads(page.evaluate(script, plot))
    return {line["name"]: line for line in found if line.get("name") and line.get("line", {}).get("width")}


PLAIN = "plain"
TWIN = "twin"


def test_the_payload_is_the_comparison_with_every_group_as_the_baseline(runs):
    payload = comparison_payload(runs)
    assert [group["name"] for group in payload["groups"]] == [PLAIN, "ddl", TWIN]
    assert payload["baseline"] == PLAIN
    for baseline, shown in payload["against"].items():
        found = compare(runs, baseline=baseline)
        assert shown["notes"] == list(found.notes)
        for group in found.rows:
            for axis in payload["axes"]:
                rows = shown["differences"][group.name][axis]
                if group is found.baseline:
                    assert rows
                    assert all(row[1] == 0 for row in rows)
                else:
                    expected = found.differences(group, axis)
                    assert [row[2:] for row in rows if row[2] is None] == [
                        [None, d.count] for d in expected.values() if d.deviation is None
                    ]
                    for row, (at, d) in zip(rows, expected.items(), strict=True):
                        assert row[:2] == pytest.approx([at, d.mean], rel=1e-6)
                        assert row[2] is None or row[2:] == pytest.approx([d.deviation, d.count], rel=1e-6)
    json.dumps(payload, allow_nan=False)


def test_incomparable_rows_are_named_without_a_difference(tmp_path):
    runs = [planted_run(tmp_path / "a"), planted_run(tmp_path / "b", "ddl", sequence_length=16)]
    runs.append(planted_run(tmp_path / "c", "mhc", sequence_length=32))
    found = comparison_payload(runs)["against"]["ddl"]
    assert (found["refused"], found["final"]["mhc"], found["unit"]) == (["mhc"], None, "nats per token")
    assert any("cannot be compared" in note for note in found["notes"])


def test_settings_that_differ_only_at_the_end_of_their_text_are_distinguished(tmp_path):
    same = "gated-delta:value_channels=4,erase=none,"
    found = comparison_payload(
        [planted_run(tmp_path / end, f"{same}{end}") for end in ("write=value", "write_gate=true")]
    )
    (row,) = (row for row in found["settings"]["rows"] if row[0] == "model.connection")
    assert row[1] != row[2]


def test_long_runs_are_thinned_and_their_training_loss_is_averaged(tmp_path):
    first, second = planted_run(tmp_path / "a", "residual"), planted_run(tmp_path / "b", "ddl", offset=0.5)
    for folder in (first, second):
        rows = [{"step": n, "tokens": n, "seconds": n, "loss": n % 2, "val_loss": 1 / n} for n in range(1, 1001)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    payload = comparison_payload([first, second])
    (curve,) = payload["groups"][0]["runs"]
    assert len(curve["training"]) == 200
    assert curve["training"][7][3] == pytest.approx(0.5, abs=0.11)
    assert [row[0] for row in (curve["validation"][0], curve["validation"][-1])] == [1, 1000]
    assert len(payload["against"]["residual"]["differences"]["ddl"]["tokens"]) == 60


def test_a_loss_that_is_not_finite_does_not_break_the_page(tmp_path):
    first, second = planted_run(tmp_path / "a", "residual"), planted_run(tmp_path / "b", "ddl")
    with (second / "metrics.jsonl").open("a") as file:
        print(json.dumps({"step": 101, "tokens": 6464, "seconds": 51, "loss": None, "val_loss": None}), file=file)
    payload = comparison_payload([first, second])
    json.dumps(payload, allow_nan=False)
    assert payload["groups"][1]["runs"][0]["validation"][-1][3] is None
    assert any("not finite" in note for note in payload["against"]["residual"]["notes"])


def test_differences_are_shown_on_every_axis_and_to_every_baseline(one_page, runs):
    page = one_page
    drawn(page, PLAIN)
    payload = comparison_payload(runs)
    for axis in ("step", "tokens", "seconds"):
        page.locator("[data-control=axis]").select_option(axis)
        drawn(page, PLAIN, axis)
        shown = lines(page, "difference")
        for name in ("ddl", TWIN):
            rows = payload["against"][PLAIN]["differences"][name][axis]
            assert shown[name]["x"] == [row[0] for row in rows]
            assert shown[name]["y"] == [row[1] for row in rows]
        assert set(shown[f"{PLAIN} (baseline)"]["y"]) == {0}
    assert "double-click" in page.locator("[data-panel=difference] .note").inner_text()
    page.locator("[data-control=baseline]").select_option("ddl")
    drawn(page, "ddl", "seconds")
    assert lines(page, "difference")[PLAIN]["y"][-1] == pytest.approx(0.22, abs=0.03)
    until(page, "location.hash.includes('baseline=ddl')")
    page.reload()
    drawn(page, "ddl", "seconds")


def test_the_table_has_means_deviations_and_differences(one_page, runs):
    page = one_page
    go_to(page, "view=compare")
    drawn(page, PLAIN)
    found = compare(runs)
    cells = {
        row[0]: row[1:]
        for row in (
            [cell.inner_text() for cell in row.locator("th, td").all()] for row in page.locator("[data-group]").all()
        )
    }
    for row in found.table()[1]:
        seeds, loss, difference, *_ = cells[row[0]]
        assert [seeds, loss] == row[1:3]
        assert difference.replace("−", "-") == row[3]
    settings = page.locator("[data-table=settings]").inner_text()
    assert "model.connection" in settings
    assert "train.lr" in settings
    assert "seed" not in settings
    assert "not recorded" in page.locator("[data-note=memory]").inner_text()


def test_losses_are_shown_against_their_cost(open_page, page_file):
    page = open_page(page_file, "view=compare", viewport=(390, 844), dark=True)
    drawn(page, PLAIN)
    assert lines(page, "loss")["ddl"]["y"][-1] == pytest.approx(4.03 - 0.24 + 0.01)
    script = """() => document.querySelector("[data-plot=price-tokens_per_second]").data.map(
        (d) => [d.name, d.x[0], d.y[0], d.error_y.visible])"""
    shown = {name: rest for name, *rest in page.evaluate(script)}
    assert shown["ddl"][0] == pytest.approx(64 / 0.6)
    assert shown["ddl"][2] is True
    assert shown[TWIN][2] is False
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.fixture(scope="module")
def five(tmp_path_factory) -> list[Path]:
    """Runs of three seeds that are clearly better and clearly worse, of two, of one, and of one that is far slower."""
    folder = tmp_path_factory.mktemp("five")
    runs = [planted_run(folder / f"plain-{seed}", seed=seed) for seed in range(3)]
    runs += [planted_run(folder / f"ddl-{seed}", "ddl", seed, offset=-0.2 - 0.01 * seed) for seed in range(3)]
    runs += [planted_run(folder / f"hc-{seed}", "hc", seed, offset=0.2 + 0.01 * seed) for seed in range(3)]
    runs += [planted_run(folder / f"mhc-{seed}", "mhc", seed, offset=-0.2 - 0.1 * seed) for seed in range(2)]
    runs += [planted_run(folder / "one", "ddl-tc", offset=-0.0011)]
    return [*runs, planted_run(folder / "slow", "edelta", seconds_per_step=60)]


@pytest.fixture(scope="module")
def page_of_five(open_shared_page, five, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    return open_shared_page(write_page(file, *page_of([], comparison_payload(five))), "view=compare")


def test_a_difference_is_coloured_only_if_its_interval_excludes_zero(page_of_five):
    page = page_of_five
    drawn(page, "residual")

    def shown():
        script = """() => [...document.querySelectorAll("[data-group]")].map(
            (row) => [row.dataset.group, row.children[3].className, row.children[3].innerText])"""
        return {name: (kind, text) for name, kind, text in page.evaluate(script)}

    found = shown()
    assert {name: kind for name, (kind, _) in found.items() if kind} == {"ddl": "better", "hc": "worse"}
    assert found["ddl-tc"] == ("", "−0.0011")
    page.locator("[data-control=baseline]").select_option("hc")
    drawn(page, "hc")
    assert {name: kind for name, (kind, _) in shown().items() if kind} == {"residual": "better", "ddl": "better"}


def test_a_scheme_has_one_colour_in_every_picture_of_the_page_and_of_the_command(page_of_five, five):
    page = page_of_five
    expected = {group.name: to_hex(style["color"]) for group, style in _styles(compare(five))}
    script = """() => {
        const found = [];
        const add = (name, colour) => {
            const of = (part) => Math.round(Number(part)).toString(16).padStart(2, "0");
            found.push([name, "#" + colour.match(/[\\d.]+/g).slice(0, 3).map(of).join("")]);
        };
        for (const plot of document.querySelectorAll("[data-plot]"))
            for (const {name, mode, line, marker} of plot.data)
                if (name && mode) add(name.replace(" (baseline)", ""), mode === "markers" ? marker.color : line.color);
        for (const key of document.querySelectorAll(".keys span"))
            add(key.innerText, getComputedStyle(key.firstChild).backgroundColor);
        return found;
    }"""
    for baseline in ("residual", "hc"):
        go_to(page, f"view=compare&theme=light&baseline={baseline}")
        drawn(page, baseline)
        found = page.evaluate(script)
        assert set(map(tuple, found)) == set(expected.items())
        assert len(found) > 5 * len(expected)


def test_runs_without_common_seconds_are_named_in_or_in_place_of_the_picture(page_of_five):
    page = page_of_five
    go_to(page, "view=compare&axis=seconds")
    drawn(page, "residual", "seconds")
    note = page.locator("[data-panel=difference] .note")
    assert "No common seconds with residual: edelta." in note.inner_text()
    assert annotations(page) == []
    page.locator("[data-control=baseline]").select_option("edelta")
    drawn(page, "edelta", "seconds")
    assert annotations(page) == ["No common seconds with edelta"]
    title = page.evaluate("document.querySelector('[data-plot=difference]').layout.xaxis.title.text")
    assert title == "wall-clock seconds of training"
    page.locator("[data-control=axis]").select_option("step")
    drawn(page, "edelta")
    assert annotations(page) == []
    assert "No common" not in note.inner_text()


def annotations(page):
    return page.evaluate("document.querySelector('[data-plot=difference]').layout.annotations.map(({text}) => text)")
