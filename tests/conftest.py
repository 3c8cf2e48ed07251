"""What all tests share: one thread, property tests that draw the same examples in every run, kernels on the CPU, and
the marks of what `make check` leaves out."""

import gc
import multiprocessing
import os
import signal
from collections import defaultdict
from contextlib import suppress
from functools import cache
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

TESTS = Path(__file__).parent
SLOW = TESTS / "slow.txt"  # by `python tools/slow_tests.py`: tests whose cases take more than 0.04 seconds of CPU

os.fsync = lambda descriptor: None  # a test kills processes and not the machine, for which a disk must be waited for
gc.disable()  # what is imported and collected stays: looking for garbage in it takes a fifth of that time
with suppress(ModuleNotFoundError):  # `make gpu` runs tests where hypothesis may be missing, and none of them needs it
    from hypothesis import settings

    settings.register_profile("residua", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("quick", settings.get_profile("residua"), max_examples=5)  # of `make check`
    settings.load_profile("residua")

# A test gets marks from the file that it is in, from a fixture that it uses, from a parameter, from its time, or from
# decorators.
MARKED_FILES = {
    "ops/kernels/test_triton_*.py": "interpreter",
    "models/test_triton_models.py": "interpreter",
    "ops/kernels/test_kernels_compile.py": "compiler nightly",
    "ops/test_ops_compile.py": "compiler",
    "models/test_model_compile.py": "compiler",
    "models/test_activation_memory.py": "slow",
    "conversion/test_convert_families.py": "slow",
    "models/test_foreign_tools.py": "slow",
    "models/test_transformers_testers.py": "slow nightly",
    "benchmarks/test_*.py": "nightly",
    "test_gpu_steps.py": "nightly",
}
MARKED_FIXTURES = {"browser": "browser nightly", "start": "processes", "quick_pool": "processes"}

# Single tests of these take minutes. They come first, so that no worker is left with one when all else is done.
LONGEST = ("test_docs.py", "test_first_run.py", "test_links.py")


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


@pytest.fixture(autouse=True)
def seed():
    """What a test draws depends on no other test."""
    import torch

    torch.manual_seed(0)


def pytest_collection_finish():
    gc.freeze()  # every collection from here on passes over a million objects of imports and tests
    gc.enable()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)
    ours = [item for item in items if item.path.is_relative_to(TESTS)]  # a call may name docs/ or resbench/ too
    shared = _shared_tests(ours)
    slow = set(SLOW.read_text(encoding="utf-8").split())
    for item in ours:
        marks = {*_marks_of_file(item.path), *_marks_of_fixtures(item), *_marks_of_scheme(item, shared)}
        for mark in marks | ({"slow"} if _name(item) in slow else set()):
            item.add_marker(mark)


def _name(item):
    return f"{item.path.relative_to(TESTS).as_posix()}::{item.originalname}"


@cache
def _marks_of_file(path):
    name = path.relative_to(TESTS)
    return {mark for pattern, marks in MARKED_FILES.items() if name.match(pattern) for mark in marks.split()}


def _marks_of_fixtures(item):
    fixtures = set(item.fixturenames) - _parameters(item).keys()  # a parameter may have the name of a fixture
    return {mark for name in fixtures & MARKED_FIXTURES.keys() for mark in MARKED_FIXTURES[name].split()}


def _shared_tests(items):
    """Return the test functions that are tried on as many schemes as half of all presets."""
    from support.variants import PRESETS

    tried = defaultdict(set)
    for item in items:
        tried[item.function] |= _schemes(item)
    return {function for function, schemes in tried.items() if len(schemes) > len(PRESETS) / 2}


def _marks_of_scheme(item, shared):
    """Of a shared test, `make check` tries few presets and `make nightly` all schemes. `make test` tries all presets on
    connections by themselves, and few on what is built with them."""
    from support.variants import CONTRACT, KINDS, PRESETS

    schemes = _schemes(item)
    if item.function not in shared:
        return {"variant"} if schemes - PRESETS.keys() else set()
    if schemes - (PRESETS.keys() if TESTS / "connections" in item.path.parents else KINDS):
        return {"variant", "nightly"}
    return {"variant"} if schemes - (CONTRACT if item.path.name == "test_contract.py" else KINDS) else set()


def _schemes(item):
    return {value for value in _parameters(item).values() if isinstance(value, str)} & _names()


@cache
def _names():
    from support.variants import ALL, NON_CAUSAL

    return (ALL | NON_CAUSAL).keys()


@pytest.fixture
def quick_pool(monkeypatch):
    """The processes of `run_jobs` begin as copies of one that has imported the laboratory, as those of `start` do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["residua.lab.experiment"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}
