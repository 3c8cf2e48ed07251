"""The errors that the command line prints as one line: a mistake in the input, or a failure at run time."""

from collections.abc import Iterator
from contextlib import contextmanager

_LAB = {
    *("datasets", "filelock", "huggingface_hub", "matplotlib", "numpy", "plotly", "pyarrow", "rich", "safetensors"),
    *("scipy", "tensorboard", "tokenizers", "transformers", "yaml"),
}
PACKAGES = {"lab": _LAB, "eval": _LAB | {"lm_eval", "accelerate"}}
"""What the extras bring, by the names that are imported."""


class InputError(ValueError):
    """The user's input cannot be used. The message says what was expected, what came and what to do. Exit status 2."""


class RunError(RuntimeError):
    """Something failed while running on good input. The message says what, and what was kept. Exit status 1."""


class Diverged(RunError):
    """A loss or a gradient is not finite."""


class ReportedElsewhere(Exception):
    """Another process of the same job reports the error. This one ends silently, with the same exit `status`."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


def first_line(error: BaseException) -> str:
    """Return the first line with text of an error's message, or the name of its class where it has none."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import optional packages of the extra `name` in this context.

    Raises:
        ModuleNotFoundError: a package is missing; if the extra brings it, the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES[name]:
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed; it comes with: pip install 'residua[{name}]'", name=error.name
        ) from error
