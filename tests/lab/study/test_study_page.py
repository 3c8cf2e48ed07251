"""The page of a study: one file, inert, sorted by a click, with every run behind a row."""

from residua.lab.study.report import TEMPLATE, page, payload
from support.planted_study import changed, copied, planted, records, searched

NASTY = "</script><img src=x onerror=\"document.title='broken'\"><!-- & \u2028 ]]>"


def written(tmp_path, found=None, **changes):
    path = tmp_path / "index.html"
    path.write_text(page({**payload(found or planted()), **changes}), encoding="utf-8")
    return path


def test_the_page_loads_no_resource():
    text = TEMPLATE.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    for word in (" src=", "url(", "@import", "innerHTML", "fetch("):
        assert word not in text


def test_the_table_sorts_and_a_row_shows_its_runs(open_page, tmp_path):
    opened = open_page(written(tmp_path))
    rows = opened.locator("#main > .scroll tbody tr")
    assert rows.count() == 2
    assert rows.first.get_attribute("data-scheme") == "ddl"
    assert "-0.2000 ± 0.2484" in rows.first.inner_text()
    opened.click('[data-key="validation loss"]')
    assert opened.locator("th[aria-sort=descending]").inner_text().startswith("validation loss")
    assert rows.first.get_attribute("data-scheme") == "residual"
    opened.click("tr[data-scheme=ddl]")
    assert opened.locator("#detail tbody tr").count() == 5
    assert opened.locator("#detail svg polygon").count() == 1
    opened.keyboard.press("Enter")
    assert opened.locator("#detail tbody tr").count() == 0


def test_a_worth_beyond_the_longest_runs_sorts_by_its_bound(open_page, tmp_path):
    found = planted(runs=[*records(), *copied("hc")], schemes={"residual": {}, "ddl": {}, "hc": {}})
    values = payload(found)
    place = values["columns"].index("vs residual, worth")
    for row, worth in zip(values["rows"], ("–", "> 1.5 tokens", "1.10 tokens")):
        row["cells"][place] = worth
    path = tmp_path / "index.html"
    path.write_text(page(values), encoding="utf-8")
    opened = open_page(path)
    order = []
    for _ in range(2):
        opened.click('[data-key="vs residual, worth"]')
        rows = opened.locator("#main > .scroll tbody tr")
        order.append([row.get_attribute("data-scheme") for row in rows.all()])
    assert sorted(order) == [["ddl", "hc", "residual"], ["hc", "ddl", "residual"]]


def test_every_point_of_a_search_over_all_seeds_is_listed_with_the_share_that_copies(open_page, tmp_path):
    assert open_page(written(tmp_path)).locator("#points").inner_text() == ""
    runs, tuning = searched()
    opened = open_page(written(tmp_path, planted(runs, [], tuning=tuning)))
    listed = [row.inner_text() for row in opened.locator("#points tbody tr").all()]
    assert len(listed) == 4
    assert sum("lr 0.004" in text and "1 of 3, step 60" in text for text in listed) == 2


def test_marks_whose_intervals_exclude_zero_are_filled_as_in_the_picture(open_page, tmp_path):
    far = changed(records(), lambda row: {"val_loss": 0.0, "curve": []}, scheme="ddl", kind="report")
    caption = "Filled: a primary contrast that is clear of zero after Holm's correction over all primary contrasts"
    for primary, said, filled in (({"small": [["ddl", "residual"]]}, True, ["tokens"]), ({}, False, [])):
        opened = open_page(written(tmp_path, planted(far, primary=primary)))
        fills = [mark.get_attribute("fill") for mark in opened.locator("svg[aria-label^=Differences] circle").all()]
        assert [fill for fill in fills if fill != "var(--paper)"] == [f"var(--{measure})" for measure in filled]
        assert (caption in opened.locator("#main").inner_text()) is said


def test_a_difference_over_some_of_the_seeds_is_marked(open_page, tmp_path):
    fewer = [r for r in records() if (r["scheme"], r["kind"], r["seed"]) != ("residual", "report", 3)]
    rows = open_page(written(tmp_path, planted(fewer))).locator("#main > .scroll tbody")
    assert "-0.1500 ± 0.5436 (2 seeds)" in rows.inner_text()


def test_markup_in_hostile_texts_is_inert(open_page, tmp_path):
    hostile = [{**r, "scheme": NASTY, "connection": NASTY} if r["scheme"] == "ddl" else r for r in records()]
    found = planted(hostile, schemes={"residual": {}, NASTY: {}})
    opened = open_page(written(tmp_path, found, title=NASTY))
    assert opened.title() == NASTY
    opened.locator("#main > .scroll tbody tr").first.click()
    assert opened.locator("img").count() == 0
    assert "<img" in opened.locator("#main > .scroll tbody").inner_text()


def test_the_page_of_a_study_without_finished_rows_notes_this(open_page, tmp_path):
    opened = open_page(written(tmp_path, planted([], [])))
    assert "No finished row yet" in opened.locator("#main").inner_text()


def test_a_narrow_screen_shows_all_of_the_pictures(open_page, tmp_path):
    opened = open_page(written(tmp_path), viewport=(360, 700))
    opened.click("tr[data-scheme=ddl]")
    assert opened.locator("#main svg").count() == 2
    for text in opened.locator("#main svg, #main svg text").all():
        box = text.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    for picture in opened.locator("#main svg").all():
        bottom = max(y + height for y, height in picture.evaluate(
            "(svg) => [...svg.querySelectorAll('text')].map((text) => [text.getBBox().y, text.getBBox().height])"
        ))  # fmt: skip
        assert bottom <= picture.evaluate("(svg) => svg.viewBox.baseVal.height")
    assert opened.evaluate("document.documentElement.scrollWidth") == 360


def test_the_page_shows_tuned_settings_and_why_there_is_no_answer(open_page, tmp_path):
    asked = {"gain": {"ask": "Who?", "compare": [["ddl", "residual"]], "at": ["tokens", "compiled seconds"]}}
    opened = open_page(written(tmp_path, planted(questions=asked)))
    opened.click("tr[data-scheme=ddl]")
    assert "lr 0.008 (edge)" in opened.locator("tr[data-scheme=ddl]").inner_text()
    assert "compiled steps of ddl and residual were not timed" in opened.locator("section.question").inner_text()


def test_questions_show_their_answers(open_page, tmp_path):
    pair = [["ddl", "residual"]]
    asked = {"one": {"ask": NASTY, "compare": pair}, "two": {"ask": "And?", "compare": [["hc", "residual"]]}}
    found = planted(questions=asked, schemes={"residual": {}, "ddl": {}, "hc": {}})
    opened = open_page(written(tmp_path, found))
    first, second = opened.locator("section.question").all()
    assert NASTY.replace("\u2028", " ")[:20] in first.inner_text()
    assert "ddl − residual" in first.inner_text()
    assert "-0.2000 ± 0.2484" in first.inner_text()
    assert "would see" in first.inner_text()
    assert "Waiting for hc." in second.inner_text()
    assert opened.locator("img").count() == 0
