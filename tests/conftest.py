"""What all tests share: one thread, property tests that draw the same examples in every run, kernels on the CPU, and
the marks of what `make check` leaves out."""

import gc
import multiprocessing
import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.browser import browser, open_page, open_shared_page  # noqa: F401
from support.processes import alone, start  # noqa: F401

# A shell starts what runs in the background with SIGINT ignored, and nohup with SIGHUP; tests send both.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.fsync = lambda descriptor: None  # a test kills processes and not the machine, for which a disk must be waited for
gc.disable()  # what is imported and collected stays: looking for garbage in it takes a fifth of that time
with suppress(ModuleNotFoundError):  # `make gpu` runs tests where hypothesis may be missing, and none of them needs it
    from hypothesis import settings

    settings.register_profile("residua", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("quick", settings.get_profile("residua"), max_examples=5)  # of `make check`
    settings.load_profile("residua")

# A test gets a mark from the file that it is in, from a fixture that it uses, or from a decorator of its own.
MARKED_FILES = {
    "ops/kernels/test_triton_*.py": "interpreter",
    "models/test_triton_models.py": "interpreter",
    "ops/kernels/test_kernels_compile.py": "compiler",
    "ops/test_ops_compile.py": "compiler",
    "models/test_model_compile.py": "compiler",
    "models/test_activation_memory.py": "slow",
    "conversion/test_convert_families.py": "slow",
    "models/test_foreign_tools.py": "slow",
    "models/test_transformers_testers.py": "slow",
    "test_mup_check.py": "slow",
}
MARKED_FIXTURES = {"browser": "browser", "start": "processes", "quick_pool": "processes"}

# Single tests of these take minutes. They come first, so that no worker is left with one when all else is done.
LONGEST = ("test_docs.py", "test_first_run.py", "test_links.py")

# In these folders `make check` tries every preset; elsewhere, of a test for most presets, those of `variants.KINDS`.
ALL_PRESETS = ("connections", "ops")


def pytest_configure(config):
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only hands tests to its workers, which start seconds sooner without torch here
    import torch

    # Triton decides when it is imported whether kernels are interpreted, and many packages import it where it is.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # Inductor lets g++ compile what it writes without optimisations, in processes that tests start too.
        os.environ |= {"AOT_INDUCTOR_DEBUG_COMPILE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        # A seed is queued for every kind of device that may come, and the stack as text beside it, which takes longer.
        for device in (torch.cuda, torch.mtia, torch.xpu):
            device.traceback = SimpleNamespace(format_stack=list)
    torch.set_num_threads(1)


def pytest_collection_finish():
    gc.freeze()  # every collection from here on passes over a million objects of imports and tests
    gc.enable()


def pytest_collection_modifyitems(items):
    from support.variants import KINDS, NON_CAUSAL, PRESETS, VARIANTS  # after the environment is set

    items.sort(key=lambda item: item.path.name not in LONGEST)
    tests = Path(__file__).parent
    variants = {*VARIANTS, *NON_CAUSAL}
    texts = [{value for value in _parameters(item).values() if isinstance(value, str)} for item in items]
    tried = defaultdict(set)  # the schemes that each test function is tried on
    for item, found in zip(items, texts):
        tried[item.function] |= found & PRESETS.keys()
    files = {}
    for item, found in zip(items, texts):
        if item.path not in files:
            name = item.path.relative_to(tests)
            marks = {mark for pattern, mark in MARKED_FILES.items() if name.match(pattern)}
            files[item.path] = marks, name.parts[0] not in ALL_PRESETS
        marks, few = files[item.path]
        fixtures = set(item.fixturenames) - _parameters(item).keys()  # a parameter may have the name of a fixture
        marks = marks | {mark for fixture, mark in MARKED_FIXTURES.items() if fixture in fixtures}
        others = PRESETS.keys() - KINDS if few and len(tried[item.function]) > len(PRESETS) / 2 else set()
        if found & (variants | others):
            marks.add("variant")
        for mark in marks:
            item.add_marker(mark)


@pytest.fixture
def quick_pool(monkeypatch):
    """The processes of `run_jobs` begin as copies of one that has imported the laboratory, as those of `start` do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["residua.lab.experiment"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}
