"""Take the two pictures of the explorer in the README, docs/explorer-delta-write.png and docs/explorer-inspect.png.

    python tools/explorer_screenshots.py --run runs/demo/ddl-tc

Needs the packages of the extra `lab`, playwright and a Chromium (apt-get install chromium). The run is any trained one;
that of the demo is made by `residua demo`.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from residua.lab.explorer import write_page
from residua.lab.explorer.collect import collect, page_of

SIZE = {"width": 1280, "height": 900}
MARGIN = 16
BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
PICTURES = {
    # The state of the page, what has to be there before the picture is taken, and where it ends.
    "explorer-delta-write.png": ("view=learn&topic=write&theme=light", "svg", ".stage.more"),
    "explorer-inspect.png": ("view=inspect&theme=light&sublayer=2&token=63", "[data-drawn]", "[data-panel=regimes]"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", default="runs/demo/ddl-tc", help="a trained run (default: %(default)s)")
    parser.add_argument("--out", default="docs", help="folder for the pictures (default: %(default)s)")
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        parser.error(f"found none of {', '.join(BROWSERS)}: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = write_page(Path(folder) / "page.html", *page_of(*collect([arguments.run])))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (state, ready, last) in PICTURES.items():
            page = browser.new_page(viewport=SIZE)
            page.goto(f"{file.as_uri()}#{state}")
            page.wait_for_selector(ready, state="attached", timeout=120_000)
            page.wait_for_timeout(1000)  # of fonts and transitions
            take(page, last, Path(arguments.out) / name)
        browser.close()


def take(page: Page, last: str, path: Path) -> None:
    """The page from its top to below the element `last`."""
    box = page.locator(last).first.bounding_box()
    clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": box["y"] + box["height"] + MARGIN}
    page.screenshot(path=path, clip=clip, full_page=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
