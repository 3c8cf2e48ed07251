"""A real browser with the network off, for pages that are opened from disk."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MISSING = "no Chromium found: apt-get install chromium, then pip install playwright"
# The first is Chromium without its windows: lighter, and enough.
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE = (1280, 900)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests; what needs it is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason=MISSING)
    executable = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if executable is None:
        pytest.skip(MISSING)
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=list(QUIET))
        yield started
        started.close()


OpenPage = Callable[..., Any]


@contextmanager
def pages(browser: Any) -> Iterator[OpenPage]:
    """`open_page(path, state="", viewport=WIDE, dark=False, touch=False)` opens a file from disk with the network off.

    state is what the address has after #. It fails, at its end, for any request but that for the file itself,
    any message in the console that is an error or a warning, and any exception in the page.
    """
    contexts, trouble = [], []

    def opened(path: Path, state: str = "", viewport: tuple[int, int] = WIDE, dark: bool = False, touch: bool = False):
        context = browser.new_context(
            viewport={"width": viewport[0], "height": viewport[1]},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
        )
        contexts.append(context)
        context.set_offline(True)
        address = Path(path).resolve().as_uri()
        page = context.new_page()
        page.set_default_timeout(90_000)  # of a machine that does other things as well

        def asked(request):
            if request.url.partition("#")[0] != address and not request.url.startswith("data:"):
                trouble.append(f"request: {request.url[:200]}")

        page.on("request", asked)
        page.on("pageerror", lambda error: trouble.append(f"exception: {error}"))
        page.on(
            "console", lambda said: said.type in ("error", "warning") and trouble.append(f"{said.type}: {said.text}")
        )
        page.goto(f"{address}#{state}" if state else address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not trouble, "\n".join(trouble)


@pytest.fixture
def open_page(browser) -> Iterator[OpenPage]:
    """As `pages`, for one test."""
    with pages(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def open_shared_page(browser) -> Iterator[OpenPage]:
    """As `pages`, for tests that share one page, which takes seconds to open; errors are reported after the last."""
    with pages(browser) as opened:
        yield opened


def go_to(page: Any, state: str) -> None:
    """Makes `state` what the address has after #, and has the page follow, whatever happened just before.

    The page writes a choice into its address up to 150 milliseconds later. Until then the address may already be
    the one that is asked for, and the browser would tell the page of no change.
    """
    page.evaluate("(state) => { location.hash = state; dispatchEvent(new Event('hashchange')); }", state)
