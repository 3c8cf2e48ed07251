"""The page as a file: one, self-contained, with what is put in it inert."""

import json
import re

import numpy as np
import pytest

from residua.lab.explorer import page as module
from residua.lab.explorer.page import ASSETS, modules, write_page
from support.pages import script

EMPTY = {"title": "residua", "traces": [], "comparison": None}
NASTY = "</script><img src=x onerror=\"document.title='broken'\"><!-- <script> & \u2028 ]]>"


def test_every_file_in_the_folder_of_the_page_is_an_imported_module():
    imported, new = set(), {"main.js"}
    while new:
        imported |= new
        new = {name for path in new for name in re.findall(r'from "\./(.+)";', (ASSETS / path).read_text())} - imported
    assert imported == modules(ASSETS).keys()
    assert {path.suffix for path in ASSETS.iterdir()} == {".js", ".css", ".html"}


def test_the_page_is_one_file_that_fetches_nothing(tmp_path):
    path = write_page(tmp_path / "folder" / "page.html", EMPTY, {})
    text = path.read_text(encoding="utf-8")
    assert [one.name for one in path.parent.iterdir()] == ["page.html"]
    assert len(text) < 300_000
    assert " src=" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert "<!-- " not in text


def test_markup_in_texts_is_inert(open_page, tmp_path):
    payload = EMPTY | {"title": NASTY, "texts": [NASTY, {"deep": NASTY}]}
    page = open_page(write_page(tmp_path / "page.html", payload, {}))
    page.wait_for_selector("h1")
    assert page.title() == NASTY
    found = page.evaluate("JSON.parse(document.getElementById('payload').textContent)")
    assert found["texts"] == [NASTY, {"deep": NASTY}]
    assert page.locator("img").count() == 0
    assert NASTY.split("\u2028")[0].strip() in page.locator("#top").inner_text()


def test_a_lone_surrogate_in_a_text_is_written(tmp_path):
    path = write_page(tmp_path / "page.html", EMPTY | {"title": "\ud800", "texts": ["\udcff"]}, {})
    assert r'"texts":["\udcff"]' in path.read_text(encoding="utf-8")


def test_arrays_are_decoded_unchanged(open_page, tmp_path, monkeypatch):
    """They are read through typed views, as Inspect and Compare do."""
    for name in ("data.js", "index.html", "style.css", "learn.css", "panels.css"):
        (tmp_path / name).write_text((ASSETS / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "main.js").write_text(
        'import {arrays, payload} from "./data.js";\n'
        "const keys = payload().keys;\n"
        "Promise.all(keys.map(arrays)).then((found) => {\n"
        "  window.found = found.map((array) => [array.constructor.name, array.shape, [...array].map(String)]);\n"
        "});\n"
        'arrays("none").catch((error) => { window.missing = error.message; });\n'
    )
    monkeypatch.setattr(module, "ASSETS", tmp_path)
    rng = np.random.default_rng(0)
    halves = np.array([0, -0.0, 1 / 3, -2.5, 65504, 6e-8, 6.2e-5, np.inf, -np.inf, np.nan], dtype=np.float16)
    given = {
        "trace-0/beta": rng.normal(size=(3, 4)).astype(np.float32),
        "halves": halves,
        "wide": rng.normal(size=5),
        'a "quoted" & odd <key>': np.arange(6, dtype=np.int64).reshape(1, 2, 3) - 3,
        "flags": np.array([True, False]),
        "none": np.zeros((0, 4), dtype=np.float32),
        "scalar": np.float32(2.5).reshape(()),
    }
    expected = {"float16": "Float32Array", "float32": "Float32Array", "float64": "Float64Array", "int64": "Int32Array"}
    given.pop("none")
    path = write_page(tmp_path / "page.html", EMPTY | {"keys": list(given)}, given)
    page = open_page(path)
    # Not wait_for_function: the page forbids itself to evaluate text.
    page.evaluate("""new Promise((done) => {
      const look = () => (window.found && window.missing ? done() : setTimeout(look, 20));
      look();
    })""")
    assert page.evaluate("window.missing") == "this page holds no array none"
    for (name, shape, values), (key, array) in zip(page.evaluate("window.found"), given.items(), strict=True):
        assert name == expected.get(array.dtype.name, "Uint8Array"), key
        assert tuple(shape) == array.shape, key
        numbers = [float(text.replace("Infinity", "inf")) for text in values]
        np.testing.assert_array_equal(np.array(numbers), array.astype(np.float64).ravel(), err_msg=key)


def test_plotly_is_included_only_if_there_is_something_to_plot(tmp_path):
    pytest.importorskip("plotly")
    without = write_page(tmp_path / "a.html", EMPTY, {}).stat().st_size
    packed = write_page(tmp_path / "b.html", EMPTY | {"comparison": {"runs": []}}, {}).stat().st_size
    assert without < 300_000
    assert without + 1_000_000 < packed < 6_000_000


def test_the_committed_results_match_the_records():
    explorer_results = script("explorer_results")
    assert explorer_results.RESULTS.read_text(encoding="utf-8") == explorer_results.text()
    rows = [row for view in explorer_results.results()["views"] for group in view["groups"] for row in group["rows"]]
    assert {row["kind"] for row in rows} == {"published", "ours", "reference"}
    assert all(row["source"] in explorer_results.SOURCES for row in rows)
    json.dumps(rows, allow_nan=False)
