"""What the view Inspect shows of planted traces, in a real browser."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("plotly")

from residua.lab.explorer.collect import DRAWN, Source, page_of
from residua.lab.explorer.page import write_page
from residua.lab.inspection.trace import Trace
from support import planted
from support.browser import go_to
from support.waiting import until

SUBLAYERS, TOKENS = 4, 10
MANY = 100


def mixed_beta():
    return (torch.arange(SUBLAYERS * TOKENS) * 7 % 41 / 20).view(SUBLAYERS, TOKENS)


def gates(value):
    return torch.full((SUBLAYERS, TOKENS), float(value))


def mixing() -> Trace:
    """Streams that are mixed in every sublayer."""
    trace = planted.streams(constraint="doubly stochastic")
    trace.values["h_res"] = trace.values["h_res"][1:2].expand(SUBLAYERS, -1, -1, -1).contiguous()
    return trace


def uneven(*, loudest: float, tokens: slice) -> Trace:
    """A plain residual whose second sublayer changes the state of these tokens `loudest` times as much as all else."""
    trace = planted.residual(SUBLAYERS, MANY)
    change = torch.linspace(0.5, 1, SUBLAYERS * MANY).view(SUBLAYERS, MANY)
    change[1, tokens] *= loudest
    trace.values["change_norm"] = change * trace.values["state_norm"][:-1]
    return trace


def converted() -> Trace:
    """Reads over depth of a converted model, whose sublayers have the names of its norms."""
    trace = planted.depth()
    names = [f"{i // 2 + 1} {('input_layernorm', 'post_attention_layernorm')[i % 2]}" for i in range(SUBLAYERS)]
    trace.facts.update(sublayers=names, sources=["embedding", names[0], f"{names[1]} to {names[2]}"])
    for name in ("depth_weights", "depth_mean"):
        trace.values[name] = trace.values[name][..., :3].contiguous()
    return trace


def lens() -> Trace:
    """A plain residual with what it would predict after every sublayer."""
    trace = planted.residual()
    trace.values["lens_loss"] = 2 * mixed_beta()
    trace.facts["lens"] = [[f"<b>{row} {column}</b>" for column in range(TOKENS)] for row in range(SUBLAYERS)]
    return trace


GATES = ("gate_0", "gate_1")
IDENTICAL = torch.eye(8)[:1].expand(SUBLAYERS, -1).contiguous()
TRACES = {
    "mixed": planted.delta(mixed_beta(), tokens=[planted.HOSTILE, "<b>a\n", *planted.words(TOKENS - 2)]),
    "zeros": planted.delta(gates(0)),
    "ones": planted.delta(gates(1)),
    "twos": planted.delta(gates(2)),
    "identical": planted.delta(gates(2), directions=IDENTICAL),
    "nan": planted.delta(gates(torch.nan)),
    "one layer": planted.delta(torch.tensor([[0.0, 1.0, 2.0]])),
    "streams": planted.streams(),
    "geometric": planted.geometric(),
    "gated": planted.gated({name: 1 - mixed_beta() * scale for name, scale in zip(GATES, (1, 0.5))}),
    "residual": planted.residual(),
    "loud sublayer": uneven(loudest=1000, tokens=slice(None)),
    "loud tokens": uneven(loudest=1000, tokens=slice(20, 23)),
    "mixed streams": mixing(),
    "depth": planted.depth(),
    "converted": converted(),
    "several reads": planted.depth(reads=("q", "k", "v"), negative=True),
    "signed": planted.delta(2 * mixed_beta() - 2, gates={"beta": {"range": [-2.0, 2.0], "start": 0.0}}),
    "lens": lens(),
}
NAMES = list(TRACES)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    sources = [Source(name, trace) for name, trace in TRACES.items()]
    return write_page(tmp_path_factory.mktemp("inspect") / "page.html", *page_of(sources))


@pytest.fixture(scope="module")
def one_page(open_shared_page, page_file):
    return open_shared_page(page_file, "view=inspect")


@pytest.fixture
def show(one_page):
    """`show(name, sublayer, token)` moves the page to this selection and returns it."""

    def shown(name, sublayer=0, token=0, quantity=""):
        address = state(name, sublayer, token) + (quantity and f"&show={quantity}")
        go_to(one_page, address)
        drawn(one_page, NAMES.index(name), sublayer, token, quantity)
        return one_page

    return shown


def state(name, sublayer=0, token=0):
    return f"view=inspect&trace={NAMES.index(name)}&sublayer={sublayer}&token={token}"


def drawn(page, trace, sublayer, token, shown=""):
    """Wait until every panel shows this selection."""
    selector = f'[data-drawn^="{trace} {sublayer} {token} {shown}"]'
    page.wait_for_selector(selector, state="attached", timeout=250_000)


def plotted(page, name):
    """The data of a picture as plotly holds them."""
    script = """name => JSON.stringify(document.querySelector(`[data-plot="${name}"]`).data, (key, value) =>
        ArrayBuffer.isView(value) ? Array.from(value, (x) => Number.isNaN(x) ? null : x) : value)"""
    return json.loads(page.evaluate(script, name))


def line(page, plot, name):
    return next(data["y"] for data in plotted(page, plot) if data.get("name") == name)


def marked(page, plot):
    """The sublayer that a picture over depth marks."""
    return page.evaluate('name => document.querySelector(`[data-plot="${name}"]`).layout.shapes[0].x0', plot)


def cell(page, plot, row, column, rows, columns):
    """The middle of a cell of a heatmap, on the screen."""
    place = page.locator(f'[data-plot="{plot}"] .nsewdrag').first
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    return box["x"] + box["width"] * (column + 0.5) / columns, box["y"] + box["height"] * (rows - row - 0.5) / rows


def point(page, plot, x, y):
    """A place in the units of the axes, on the screen."""
    ranges = """name => { const {xaxis, yaxis} = document.querySelector(`[data-plot="${name}"]`).layout;
        return [xaxis.range, yaxis.range] }"""
    (left, right), (low, high) = page.evaluate(ranges, plot)
    return cell(page, plot, (y - low) / (high - low) - 0.5, (x - left) / (right - left) - 0.5, 1, 1)


def tip(page):
    return page.locator("body > .tip").inner_text().splitlines()


def tip_says(page, text):
    until(page, "t => document.querySelector('body > .tip').innerText.includes(t)", text)


def close(rows, tensor):
    torch.testing.assert_close(torch.tensor(rows, dtype=torch.float32), tensor, rtol=1e-6, atol=1e-6)


def test_map_and_tooltip_equal_the_trace(show):
    page, beta = show("mixed"), mixed_beta()
    close(plotted(page, "map")[0]["z"], beta)
    for row, column in [(0, 0), (3, 9), (2, 4), (1, 8)]:
        page.mouse.move(*cell(page, "map", row, column, SUBLAYERS, TOKENS))
        tip_says(page, f"token {column}")
        token, sublayer, value, regime = tip(page)
        assert token.startswith("“" + TRACES["mixed"].tokens[column].replace("\n", "⏎"))
        assert sublayer == TRACES["mixed"].facts["sublayers"][row]
        gate = beta[row, column].item()
        assert float(value.removeprefix("β = ")) == pytest.approx(gate, abs=1e-6)
        assert regime == ("identity" if gate < 0.5 else "reflection" if gate > 1.5 else "projection")


def test_the_tooltip_of_the_lens_shows_the_prediction(show):
    page = show("lens", 2, 3, "lens_loss")
    page.mouse.move(*cell(page, "map", 1, 8, SUBLAYERS, TOKENS))
    tip_says(page, "predicts “<b>1 8</b>”")


def test_the_text_is_coloured_by_the_selected_sublayer_and_markup_in_it_is_inert(show):
    page = show("mixed", 1)
    words = page.locator("[data-token]")
    assert words.all_inner_texts()[0] == planted.HOSTILE
    assert words.all_inner_texts()[1] == "<b>a⏎"
    assert page.evaluate("document.images.length") == 0
    colours = page.evaluate("[...document.querySelectorAll('[data-token]')].map((w) => w.style.background)")
    order = mixed_beta()[1].argsort().tolist()
    assert len(set(colours)) == TOKENS
    blue = [int(colours[i].split("(")[1].split(",")[0]) for i in order[:5]]
    assert blue == sorted(blue)  # from blue at 0 to neutral at 1, red grows
    words.nth(3).hover()
    assert tip(page)[0].endswith("token 3")
    page.mouse.move(*cell(page, "map", 0, 0, SUBLAYERS, TOKENS))
    tip_says(page, "token 0")
    assert planted.HOSTILE in tip(page)[0]


def test_a_click_selects_in_every_panel_and_a_reload_keeps_it(show):
    page = show("mixed")
    page.mouse.click(*cell(page, "map", 2, 7, SUBLAYERS, TOKENS))
    for again in (False, True):
        if again:
            page.reload()
        drawn(page, 0, 2, 7)
        for plot in ("regimes", "spectrum", "singular", "determinant", "defect", "state-norm", "parts"):
            assert marked(page, plot) == 2
        assert page.evaluate("document.querySelector('[data-plot=alignment]').layout.shapes[0].y0") == 1.5
        assert page.locator("[data-control=sublayer]").input_value() == "2"
        assert page.locator("[data-control=token]").input_value() == "7"
        assert page.locator("[data-token][aria-current]").get_attribute("data-token") == "7"
        assert "token 7 · 2 attention" in page.locator("[data-panel=map] .readout").inner_text()
        until(page, "location.hash.includes('sublayer=2&token=7')")
        close(line(page, "spectrum", "token 7"), 1 - mixed_beta()[:, 7])
    page.locator("[data-token='4']").click()
    drawn(page, 0, 2, 4)
    page.mouse.click(*cell(page, "alignment", 1, 3, SUBLAYERS, SUBLAYERS))
    drawn(page, 0, 1, 4)
    assert marked(page, "spectrum") == 1


def test_a_quick_click_selects_the_item_under_the_pointer(show):
    page = show("mixed")
    places = {at: cell(page, "map", *at, SUBLAYERS, TOKENS) for at in [(1, 1), (2, 7), (0, 3), (3, 9)]}
    elsewhere = cell(page, "map", 2, 5, SUBLAYERS, TOKENS)
    for at, place in places.items():
        page.mouse.move(*elsewhere)
        page.mouse.click(*place)
        drawn(page, 0, *at)
    page.mouse.click(*point(page, "map", -1, 1))  # the names beside the map are none of its cells
    page.mouse.click(*places[0, 3], button="right")
    page.mouse.move(*places[1, 1])
    page.mouse.down()
    page.mouse.move(*places[2, 7], steps=4)
    page.mouse.up()
    until(page, "document.querySelector('[data-plot=map]').layout.xaxis.range[0] > 0")
    until(page, "location.hash.includes('sublayer=3&token=9')")  # written up to 150 ms later
    page.mouse.click(*point(page, "map", 4, 1))
    drawn(page, 0, 1, 4)


def test_the_address_is_updated_at_once_and_a_typed_address_is_kept(show):
    page = show("mixed")
    page.locator("[data-token='6']").click()
    page.reload()
    drawn(page, 0, 0, 6)
    for token in (5, 3):  # the second is written later, together with what comes soon after
        page.locator(f"[data-token='{token}']").dispatch_event("click")
    page.evaluate("address => { location.hash = address }", state("mixed", 2, 8))
    drawn(page, 0, 2, 8)
    page.wait_for_timeout(400)
    assert "sublayer=2&token=8" in page.evaluate("location.hash")


def test_arrow_keys_move_the_selection(show):
    page = show("mixed", 1, 5)
    page.locator("[data-panel=map] .text").focus()
    for key, sublayer, token in [("ArrowRight", 1, 6), ("ArrowUp", 2, 6), ("ArrowLeft", 2, 5), ("ArrowDown", 1, 5)]:
        page.keyboard.press(key)
        drawn(page, 0, sublayer, token)
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    drawn(page, 0, 1, TOKENS - 1)


def test_shares_of_the_regimes_follow_the_thresholds(show):
    page = show("zeros")

    def shown():
        cells = page.locator("[data-regime]")
        return {c.get_attribute("data-regime"): c.inner_text() for c in cells.all()}

    for name, regime in [("zeros", "identity"), ("ones", "projection"), ("twos", "reflection")]:
        show(name)
        assert {key for key, share in shown().items() if share == "100.0 %"} == {regime}
        assert next(data["y"] for data in plotted(page, "regimes") if data["name"] == regime) == [1] * SUBLAYERS
    show("mixed")
    for identity, reflection in [(0.5, 1.5), (0.25, 1.5), (0.25, 1.9)]:
        page.locator("[data-control=identity]").fill(str(identity))
        page.locator("[data-control=reflection]").fill(str(reflection))
        expected = TRACES["mixed"].regimes(identity, reflection)[:, 1:]  # no gate of it is negative
        first = f"{100 * expected.mean(0)[0].item():.1f} %"
        last = f"{100 * expected.mean(0)[2].item():.1f} %"
        until(
            page,
            "([a, b]) => { const cells = document.querySelectorAll('[data-regime]');"
            " return cells[0].innerText === a && cells[2].innerText === b }",
            [first, last],
        )
        until(
            page,
            "y => document.querySelector('[data-plot=regimes]').data[0].y[1].toFixed(4) === y",
            f"{expected[1, 0].item():.4f}",
        )
    until(page, "location.hash.includes('reflection=1.9')")


def test_the_spectrum_has_room_for_every_value_of_the_gate(show):
    for name, ends in (("mixed", [-1.08, 1.08]), ("signed", [-1.16, 3.16])):
        page = show(name)
        shown = page.evaluate("""() => document.querySelector('[data-plot="spectrum"]').layout.yaxis.range""")
        assert shown == pytest.approx(ends)


def median(name):
    return lambda values: values[name].quantile(0.5, dim=1)


def at_token_3(name):
    return lambda values: values[name][:, 3]


COMPOSITE = [
    ("spectrum", "1 − β, median", lambda values: 1 - values["beta"].quantile(0.5, dim=1)),
    ("determinant", "token 3", at_token_3("determinant")),
    ("singular", "largest, median", median("singular_max")),
    ("defect", "token 3", at_token_3("defect")),
]
# What the pictures of a trace draw over depth: a picture, the name of a line, and its numbers from the trace.
LINES = {
    **dict.fromkeys(("zeros", "ones", "twos", "identical"), COMPOSITE),
    "mixed": [
        *COMPOSITE,
        ("state-norm", "‖X‖, median", median("state_norm")),
        ("parts", "erase β‖kᵀX‖", median("erase_norm")),
        ("parts", "write β‖v‖", median("write_norm")),
    ],
    "streams": [
        ("constraints", "columns", median("column_error")),
        ("determinant", "token 3", at_token_3("determinant")),
        ("similarity", "cosine, median", median("stream_similarity")),
        ("similarity", "token 3", at_token_3("stream_similarity")),
    ],
    "geometric": [("gamma", "token 3", at_token_3("gamma")), ("angle", "angle, median", median("angle"))],
    "gated": [("gate_0", "token 3", at_token_3("gate_0")), ("gate_1", "gate_1, median", median("gate_1"))],
}
# What the map of a trace shows of a quantity ("" for the one that it opens with), and what the readout says of it.
MAPS = [
    ("mixed", "erase_norm", lambda values: values["erase_norm"], "erase = "),
    ("streams", "", lambda values: torch.linalg.matrix_norm(values["h_res"] - torch.eye(3)), ""),
    ("streams", "stream_similarity", lambda values: values["stream_similarity"][:-1], ""),
    ("geometric", "", lambda values: values["gamma"], ""),
    ("geometric", "angle", lambda values: values["angle"], ""),
    ("gated", "", lambda values: values["gate_0"], "gate_0 = "),
    ("depth", "sources_read", lambda values: values["sources_read"], ""),
    ("lens", "lens_loss", lambda values: values["lens_loss"], "predicts “<b>2 3</b>”"),
]


@pytest.mark.parametrize("name", LINES)
def test_lines_over_depth_show_the_values_of_the_trace(show, name):
    page, values = show(name, token=3), TRACES[name].values
    for plot, label, numbers in LINES[name]:
        close(line(page, plot, label), numbers(values))
    if LINES[name] is COMPOSITE:
        close(plotted(page, "singular-values")[0]["y"], values["singular_values"][3])


@pytest.mark.parametrize(("name", "quantity", "numbers", "said"), MAPS)
def test_a_map_shows_the_values_of_the_trace(show, name, quantity, numbers, said):
    page = show(name, 2, 3, quantity)
    close(plotted(page, "map")[0]["z"], numbers(TRACES[name].values))
    assert said in page.locator("[data-panel=map] .readout").first.inner_text()


def test_the_range_of_a_map_is_that_of_the_gate(show):
    (data,) = plotted(show("gated"), "map")
    assert (data["zmin"], data["zmax"]) == (-1, 1)


def test_alignment_and_effective_rank_are_plotted(show):
    page = show("ones")
    close(plotted(page, "alignment")[0]["z"], torch.eye(SUBLAYERS))
    assert "4 at most: 4 (" in page.locator("[data-panel=alignment] .readout").inner_text()
    page.mouse.move(*cell(page, "alignment", 2, 1, SUBLAYERS, SUBLAYERS))
    tip_says(page, "2 attention and 1 mlp")
    assert tip(page)[1] == "|cos| = 0"
    show("identical")
    close(plotted(page, "alignment")[0]["z"], torch.ones(SUBLAYERS, SUBLAYERS))
    assert "4 at most: 1 (" in page.locator("[data-panel=alignment] .readout").inner_text()


def test_nan_values_are_noted_and_not_drawn(show):
    page = show("nan")
    assert page.locator("[data-regime='not a number']").inner_text() == "100.0 %"
    assert plotted(page, "map")[0]["z"] == [[None] * TOKENS] * SUBLAYERS
    assert page.locator("[data-token].missing").count() == TOKENS
    assert "β = not a number" in page.locator("[data-panel=map] .readout").inner_text()
    assert page.locator(".warnings li").count() > 0


def test_a_trace_of_one_layer_is_shown(show):
    page = show("one layer", token=2)
    close(plotted(page, "map")[0]["z"], torch.tensor([[0.0, 1.0, 2.0]]))
    assert page.locator("[data-regime]").all_inner_texts() == ["33.3 %"] * 3
    assert line(page, "spectrum", "token 2") == [-1]
    assert "Nearest" not in page.locator("[data-panel=alignment] .readout").inner_text()


def test_mixing_matrices_are_shown_with_the_errors_of_their_constraints(show):
    page = show("streams", 2, 4)
    values = TRACES["streams"].values
    numbers = {
        name: [float(cell.replace("−", "-")) for cell in page.locator(f"[data-matrix={name}] td").all_inner_texts()]
        for name in ("H_pre", "H_res", "H_post")
    }
    for name in numbers:
        expected = values[name.lower()][2, 4].flatten()
        torch.testing.assert_close(torch.tensor(numbers[name]), expected, rtol=0, atol=5.1e-4)
    assert [page.locator(f"[data-matrix={n}] tr").count() for n in ("H_pre", "H_res", "H_post")] == [1, 3, 3]
    assert "rows 1.00e−6, columns 2.00e−4" in page.locator("[data-panel=streams] .readout").inner_text()
    page.locator("[data-control=of]").select_option("mean")
    mean = f"{values['h_pre'][2].mean(0)[0].item():.3f}"
    until(page, "m => document.querySelector('[data-matrix=H_pre] td').innerText === m", mean)


def blank(tensor):
    """The rows of a picture: what is not read is left blank."""
    return [[x or None for x in row] for row in tensor.tolist()]


def test_reads_over_depth_are_shown_on_average_and_at_the_selected_token(show):
    values = TRACES["depth"].values
    page = show("depth", 2, 0)
    for token, sampled in [(0, 0), (MANY - 1, -1), (20, 13)]:
        show("depth", 2, token)
        assert plotted(page, "depth-mean")[0]["z"] == blank(values["depth_mean"][:, 0])
        assert plotted(page, "depth-token")[0]["z"] == blank(values["depth_weights"][:, sampled, 0])
        place = TRACES["depth"].facts["sampled"][sampled]
        assert page.locator("[data-panel=depth-reads] figcaption").nth(1).inner_text().startswith(f"token {place},")
    readout = page.locator("[data-panel=depth-reads] .readout")
    assert readout.inner_text() == f"2 attention at token {place}: 1 mlp 0.5, 1 attention 0.3333, embedding 0.1667."
    page.mouse.click(*cell(page, "depth-mean", 1, 2, SUBLAYERS, SUBLAYERS))
    drawn(page, NAMES.index("depth"), 1, 20)
    assert readout.inner_text() == "1 mlp reads only the last state."
    assert page.evaluate("document.querySelector('[data-plot=depth-token]').layout.shapes[0].y0") == 0.5
    page.mouse.move(*cell(page, "depth-token", 3, 1, SUBLAYERS, SUBLAYERS))
    tip_says(page, "reads 1 attention")
    assert tip(page) == ["2 mlp", "reads 1 attention", "weight 0.2"]
    page.mouse.move(*cell(page, "depth-token", 0, 3, SUBLAYERS, SUBLAYERS))
    tip_says(page, "does not read 2 attention")
    (data,) = plotted(page, "depth-mean")
    assert (data["zmin"], data["zmax"]) == (0, pytest.approx(0.5)), (
        "the weight 1 of a single source is beyond the scale"
    )


def test_one_of_several_reads_can_be_selected_and_weights_may_be_negative(show):
    values = TRACES["several reads"].values["depth_mean"]
    page = show("several reads", 3, 20)
    close(plotted(page, "depth-mean")[0]["z"][3], values[3].mean(0))
    page.locator("[data-control=read]").select_option(label="k")
    until(
        page,
        "z => Math.abs(document.querySelector('[data-plot=depth-mean]').data[0].z[3][0] - z) < 1e-6",
        values[3, 1, 0].item(),
    )
    close(plotted(page, "depth-mean")[0]["z"][3], values[3, 1])
    (data,) = plotted(page, "depth-token")
    assert data["zmin"] == -data["zmax"] < 0
    readout = page.locator("[data-panel=depth-reads] .readout").inner_text()
    assert readout.endswith("2 attention 0.8, 1 mlp 0.6, 1 attention 0.4, embedding −0.2.")


def test_long_names_beside_an_axis_are_truncated(show):
    page = show("converted")
    rows = ["1 input_lay…", "1 post_atte…", "2 input_lay…", "2 post_atte…"]
    ticks = "([name, axis]) => document.querySelector(`[data-plot=${name}]`).layout[axis].ticktext"
    for plot, axis in (("depth-mean", "yaxis"), ("map", "yaxis"), ("output-norm", "xaxis")):
        assert page.evaluate(ticks, [plot, axis]) == rows
    sources = ["embedding", rows[0], f"{rows[1]}<br>to {rows[2]}"]
    assert page.evaluate(ticks, ["depth-mean", "xaxis"]) == sources


PANELS = {
    "residual": [],
    "mixed": ["regimes", "spectrum", "alignment", "composite"],
    "streams": ["streams", "constraints", "composite", "similarity"],
    "geometric": ["gates", "composite"],
    "gated": ["gates"],
    "depth": ["depth-reads"],
}


def test_every_family_has_the_panels_that_apply_to_it_and_no_others(show):
    for name, panels in PANELS.items():
        shown = show(name).evaluate("[...document.querySelectorAll('[data-panel]')].map((p) => p.dataset.panel)")
        assert set(shown) == {"card", "map", "norms", *panels}


def colours(page):
    """For each row of the map, where its numbers lie between the ends of the scale."""
    (data,) = plotted(page, "map")
    z = torch.tensor(data["z"])
    return ((z - data["zmin"]) / (data["zmax"] - data["zmin"])).clamp(0, 1)


def test_a_sublayer_with_huge_values_does_not_hide_the_others(show):
    page = show("loud sublayer", 0, 40)
    parts = colours(page)
    assert parts[1].min() > 0.9
    for row in (0, 2, 3):
        assert parts[row].amax() - parts[row].amin() > 0.015
    assert parts[3].mean() - parts[0].mean() > 0.05
    change = TRACES["loud sublayer"].values["change_norm"] / TRACES["loud sublayer"].values["state_norm"][:-1]
    low, high, note = page.locator(".scale > span:not(.bar)").all_inner_texts()
    assert note == f"(logarithmic; 2 % are smaller, down to {change.min():.4g})"
    assert float(low) == pytest.approx(change.flatten().quantile(0.02).item(), rel=1e-3)
    assert float(high) == pytest.approx(change.max().item(), rel=1e-3)
    words = page.evaluate("[...document.querySelectorAll('[data-token]')].map((w) => w.style.background)")
    assert len(set(words)) > 3
    for row, column in [(0, 5), (1, 90)]:
        page.mouse.move(*cell(page, "map", row, column, SUBLAYERS, MANY))
        tip_says(page, f"token {column}")
        assert float(tip(page)[2].partition(" = ")[2]) == pytest.approx(change[row, column].item(), rel=1e-3)


def test_a_few_tokens_with_huge_values_do_not_hide_the_others_and_are_noted(show):
    page = show("loud tokens", 1, 21)
    change = TRACES["loud tokens"].values["change_norm"] / TRACES["loud tokens"].values["state_norm"][:-1]
    parts = colours(page)
    assert (parts[1, 20:23] == 1).all()
    assert parts[0].max() - parts[0].min() > 0.1
    end = change.flatten().quantile(0.98).item()
    *ends, note = page.locator(".scale > span:not(.bar)").all_inner_texts()
    assert [float(x) for x in ends] == pytest.approx([0, end], rel=1e-3)
    assert note == f"(2 % are larger, up to {change.max():.4g})"
    readout = page.locator("[data-panel=map] .readout").inner_text()
    assert float(readout.partition(" = ")[2].split()[0]) == pytest.approx(change[1, 21].item(), rel=1e-3)
    show("mixed", 1, 5)
    assert page.locator("[data-note=scale]").count() == 0


def test_without_a_trace_in_the_address_the_first_with_gates_or_mixing_is_opened(open_page, tmp_path):
    for number, (names, opened) in enumerate(
        [
            (["residual", "mixed", "zeros"], 1),
            (["residual", "loud sublayer", "streams"], 2),
            (["residual", "loud sublayer"], 0),
        ]
    ):
        sources = [Source(name, TRACES[name]) for name in names]
        file = write_page(tmp_path / f"{number}.html", *page_of(sources))
        page = open_page(file)
        drawn(page, opened, 0, 0)
        assert page.locator("[data-control=trace]").input_value() == str(opened)
        assert "trace=" not in page.evaluate("location.hash")
        if opened:
            page.evaluate("location.hash = 'view=inspect&trace=0'")
            drawn(page, 0, 0, 0)


def test_a_card_without_warnings_names_the_checks_of_the_trace(show):
    page = show("residual")
    card = page.locator("[data-panel=card]")
    assert "No warnings: all numbers are finite and the connection is causal. This connection has neither" in (
        card.inner_text()
    )
    show("mixed")
    assert "is causal and no gate is stuck at its start or saturated." in card.inner_text()
    assert "neither" not in card.inner_text()
    show("mixed streams")
    said = "is causal, the mixing has left the identity and stayed doubly stochastic and the streams are not copies of"
    assert said in card.inner_text()


def test_the_page_fits_a_phone_and_has_a_dark_theme(open_page, page_file):
    page = open_page(page_file, state("mixed"), viewport=(390, 844), dark=True, touch=True)
    drawn(page, NAMES.index("mixed"), 0, 0)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("[data-theme=light]").click()
    until(page, "before => getComputedStyle(document.body).backgroundColor !== before", light)
    page.locator("[data-token='2']").tap()
    drawn(page, 0, 0, 2)
    page.touchscreen.tap(*cell(page, "map", 1, 4, SUBLAYERS, TOKENS))
    drawn(page, NAMES.index("mixed"), 1, 4)
    go_to(page, state("loud sublayer"))
    drawn(page, NAMES.index("loud sublayer"), 0, 0)
    legend = page.locator("[data-panel=map] div.legend")
    assert legend.locator("[data-note=scale]").is_visible()
    assert legend.evaluate("(legend) => legend.scrollWidth <= legend.clientWidth")


def test_a_large_trace_stays_under_six_megabytes_and_can_be_used(open_page, tmp_path):
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(96, 8, generator=generator), dim=1)
    trace = planted.delta(2 * torch.rand(96, 2048, generator=generator), directions=directions)
    for name in ("erase_norm", "write_norm", "output_norm", "change_norm", "state_norm"):
        trace.values[name] = torch.rand(trace.values[name].shape, generator=generator)
    file = write_page(tmp_path / "large.html", *page_of([Source("large", trace)]))
    assert file.stat().st_size < 6e6
    page = open_page(file, "view=inspect&sublayer=40&token=1000")
    drawn(page, 0, 40, 1000)
    readout = page.locator("[data-panel=map] .readout").inner_text()
    shown = readout.partition("β = ")[2].split()[0]
    assert float(shown) == pytest.approx(trace.values["beta"][40, 1000].item(), rel=1e-3)
    page.locator("[data-panel=map] .text").focus()
    page.keyboard.press("ArrowUp")
    drawn(page, 0, 41, 1000)


def test_gates_of_any_name_are_plotted_over_training_from_the_telemetry(open_page, tmp_path):
    rows = [
        {
            "step": step,
            **{gate: {key: [0.1 * i + step / 100 for i in range(SUBLAYERS)] for key in DRAWN} for gate in GATES},
        }
        for step in (10, 20, 30)
    ]
    (tmp_path / "connections.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source("logged", TRACES["gated"], tmp_path)
    page = open_page(write_page(tmp_path / "page.html", *page_of([source])), "view=inspect&sublayer=3")
    drawn(page, 0, 3, 0)
    for gate in GATES:
        close(line(page, f"training-{gate}", "2 mlp"), torch.tensor([0.4, 0.5, 0.6]))
    strong = plotted(page, "training-gate_1")[-1]
    assert (strong["name"], strong["x"]) == ("2 mlp", [10, 20, 30])
    page.mouse.click(*point(page, "training-gate_1", 19, 0.32))  # at step 20 the second sublayer has 0.3
    drawn(page, 0, 1, 0)
