"""Run checks by name, and report their outcomes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

CheckFunction = Callable[..., None]

SPECIFICATION = "1.6"
"""The version of the requirements; it increases whenever a check is added or made stricter."""


class CheckFailed(AssertionError):
    """A check failed; the message names the mistake."""


class NotChecked(Exception):
    """A check does not apply; the message says why."""


def expect(condition: object, words: str) -> None:
    """Raise CheckFailed with this message unless `condition` holds."""
    if not condition:
        raise CheckFailed(words)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def equal(a: Any, b: Any) -> bool:
    """Return whether the tensors of two pytrees are equal to the last bit."""
    return len(tensors(a)) == len(tensors(b)) and all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b)))


@dataclass(frozen=True)
class Report:
    """The outcomes of several checks: `failed`, `failed_as_expected` and `not_checked` map names to reasons.

    subject: the thing that was checked, in words.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    failed_as_expected: dict[str, str] = field(default_factory=dict)
    not_checked: dict[str, str] = field(default_factory=dict)
    subject: str = ""

    def __str__(self) -> str:
        lines = [f"residua.testing, specification {SPECIFICATION}", *([self.subject] if self.subject else [])]
        lines += [f"{name}: passed" for name in self.passed]
        lines += [f"{name}: not checked, {reason}" for name, reason in self.not_checked.items()]
        lines += [f"{name}: failed as expected, {reason}" for name, reason in self.failed_as_expected.items()]
        lines += [f"{name}: FAILED, {reason}" for name, reason in self.failed.items()]
        counts = {
            "passed": len(self.passed),
            "not checked": len(self.not_checked),
            "failed as expected": len(self.failed_as_expected),
            "FAILED": len(self.failed),
        }
        return "\n".join([*lines, f"checks: {', '.join(f'{count} {word}' for word, count in counts.items() if count)}"])


@contextmanager
def apart_from_caller() -> Iterator[None]:
    """Run the `with` block as in a new process: on the CPU, in float32, with gradients and without autocast.

    The caller's defaults and random state are restored.
    """
    cpu, dtype = torch.device("cpu"), torch.get_default_dtype()
    device = nullcontext() if torch.get_default_device() == cpu else cpu  # a context slows every operation down
    gradients, random_state = torch.inference_mode(False), torch.random.fork_rng(devices=[])
    torch.set_default_dtype(torch.float32)
    try:
        with random_state, gradients, torch.enable_grad(), device, torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)


def seeded(check: CheckFunction) -> CheckFunction:
    """Wrap a check: it runs with its own random seed, apart from the caller's state."""

    @wraps(check)
    def run_seeded(subject: Any, **options: Any) -> None:
        with apart_from_caller():
            torch.default_generator.manual_seed(0)
            check(subject, **options)

    return run_seeded


class Suite(dict[str, CheckFunction]):
    """Checks by name, in order. The decorator `add` adds a check, and seeds its random numbers."""

    def add(self, check: CheckFunction) -> CheckFunction:
        self[check.__name__] = seeded(check)
        return self[check.__name__]


def expect_names(expected_failures: Mapping[str, str], checks: Mapping[str, CheckFunction]) -> None:
    """Raise TypeError unless `expected_failures` is a mapping, and ValueError if it names an unknown check."""
    if not isinstance(expected_failures, Mapping):
        raise TypeError(f"expected_failures must map names of checks to reasons, got {expected_failures!r}")
    for name in expected_failures:
        if name not in checks:
            raise ValueError(f"expected_failures must name checks, {', '.join(checks)}, got {name!r}")


def run(
    checks: Mapping[str, CheckFunction], subject: Any, expected_failures: Mapping[str, str] | None = None
) -> Report:
    """Run every check on `subject` and return the report. An error of the code under test fails its check.

    expected_failures: the reason for each check that should fail. If such a check passes, it counts as failed, because
    the list is out of date.
    """
    report, expected = Report(), expected_failures or {}
    for name, check in checks.items():
        failures = report.failed_as_expected if name in expected else report.failed
        try:
            check(subject)
        except NotChecked as reason:
            report.not_checked[name] = str(reason)
        except CheckFailed as wrong:
            failures[name] = str(wrong)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
        else:
            if name in expected:
                report.failed[name] = f"it passes: remove it from the expected failures ({expected[name]})"
            else:
                report.passed.append(name)
    return report


def require(report: Report, title: str) -> Report:
    """Return the report, or raise CheckFailed, with one line per reason, if any check failed."""
    if report.failed:
        total = len(report.failed) + len(report.passed)
        lines = [f"{title}: {len(report.failed)} of {total} checks failed (specification {SPECIFICATION})"]
        names: dict[str, list[str]] = {}
        for name, reason in report.failed.items():
            names.setdefault(reason, []).append(name)
        raise CheckFailed("\n  ".join(lines + [f"{', '.join(names[reason])}: {reason}" for reason in names]))
    return report
