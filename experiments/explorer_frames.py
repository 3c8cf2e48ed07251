"""How fast the explorer is: its first view, and the frames while each simulation is dragged, in headless Chromium.

python experiments/explorer_frames.py        appends one line to experiments/explorer-frames.jsonl

First view: from the start of the navigation until the first picture stands and a frame has passed (median of five).
Frames: the time between two of them while the mouse drags a mark, or a slider where there is none, to and fro. Only an
idle machine gives numbers that mean something: the load is recorded beside them.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from residua.lab.explorer.page import write_page
from residua.lab.records.provenance import circumstances

HERE = Path(__file__).parent
OUT = HERE / "explorer-frames.jsonl"
ROUNDS = 5
MOVES = 90
WHAT = {
    "write": "x-handle",
    "depth": None,
    "reads": "query-handle",
    "sinkhorn": "cell-12",
    "streams": "target-handle",
    "drift": None,
    "skew": "u-handle",
    "rotation": "x-handle",
    "spectrum": "cayley-handle",
    "blending": "k-handle",
    "regularisation": "start-handle",
}
STANDS = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(
  document.querySelector(".stage svg") ? performance.now() : null))))"""
WATCH = """() => {
  window.frames_seen = [];
  const watch = (now) => { window.frames_seen.push(now); window.watching = requestAnimationFrame(watch); };
  window.watching = requestAnimationFrame(watch);
}"""
STOP = "() => { cancelAnimationFrame(window.watching); return window.frames_seen; }"


def first_view(browser, address: str) -> float:
    """Milliseconds."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    taken = page.evaluate(STANDS)
    page.close()
    assert taken is not None, "the first view has no picture"
    return taken


def frames(page, address: str, topic: str, mark: str | None) -> list[float]:
    """Milliseconds between frames while something is dragged."""
    page.goto("about:blank")  # only a new load shows the topic at once
    page.goto(f"{address}#topic={topic}")
    page.wait_for_selector(".stage svg")
    target = page.locator(f"[data-mark={mark}]" if mark else "[data-slider=beta]")
    box = target.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.evaluate(WATCH)
    for i in range(MOVES):
        swing = 60 * (1 - abs(2 * (i % 30) / 30 - 1))
        page.mouse.move(x + swing, y - (swing / 2 if mark else 0))
    seen = page.evaluate(STOP)
    page.mouse.up()
    return [after - before for before, after in pairwise(seen)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the file to append to")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    executable = next(
        filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))),
        None,
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = write_page(Path(folder) / "page.html", {"title": "residua", "traces": [], "comparison": None}, {})
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        first = [first_view(browser, path.as_uri()) for _ in range(ROUNDS)]
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        taken = {topic: frames(page, path.as_uri(), topic, mark) for topic, mark in WHAT.items()}
        record = {
            "first_view_ms": round(statistics.median(first), 1),
            "frame_ms_p95": {topic: round(statistics.quantiles(one, n=20)[-1], 1) for topic, one in taken.items()},
            "frames": {topic: len(one) for topic, one in taken.items()},
            "bytes": path.stat().st_size,
            "browser": browser.version,
            "facts": circumstances(torch.device("cpu")),
        }
        browser.close()
    with arguments.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps({key: record[key] for key in ("first_view_ms", "frame_ms_p95")}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
