"""Write tests/slow.txt: the test functions that `make check` leaves out for their time alone.

    python tools/slow_tests.py

It runs every test without another mark in this process, which takes minutes, and lists those whose cases take more
than LIMIT seconds of CPU on average, with all processes that they wait for.
"""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "slow.txt"
LIMIT = 0.04
OTHERS = "interpreter or compiler or processes or browser or variant or nightly"

# One test of each thing that people do, which the fast lane keeps at any price.
KEPT = {
    "commands/test_cli.py::test_compare_prints_a_table_and_writes_the_requested_files",
    "commands/test_convert_command.py::test_a_converted_folder_computes_the_same_logits",
    "connections/test_contract.py::test_contract",
    "conversion/test_convert.py::test_every_scheme_preserves_the_model_or_says_why_not",
    "conversion/test_convert_saving.py::test_a_saved_model_is_opened_by_the_auto_classes",
    "lab/training/test_train_loop.py::test_resume_restores_the_optimizer_the_clock_and_the_random_state",
    "models/test_causality_and_padding.py::test_padding_equals_no_padding",
    "models/test_conformance.py::test_float64",
    "models/test_generation.py::test_greedy",
    "models/test_saving.py::test_a_saved_model_loads_with_the_same_logits",
    "testing/test_check_module.py::test_a_correct_module_passes_every_check",
}


class Measured:
    """A plugin of pytest that keeps the seconds of CPU of each case, by test function."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = cpu_seconds()
        outcome = yield
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        self.seconds[name].append(cpu_seconds() - before)
        return outcome


def cpu_seconds() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def slow(seconds: dict[str, list[float]]) -> list[str]:
    return sorted(name for name, cases in seconds.items() if sum(cases) > LIMIT * len(cases) and name not in KEPT)


def main() -> int:
    measured = Measured()
    status = pytest.main(["--hypothesis-profile", "quick", "-m", f"not ({OTHERS})", str(LIST.parent)], [measured])
    if status == pytest.ExitCode.OK:
        LIST.write_text("".join(f"{name}\n" for name in slow(measured.seconds)), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
