"""Data sets that can be prepared by a short name. Another one is one more entry here."""

from typing import NamedTuple


class Sample(NamedTuple):
    """One configuration of a data set on the hub, and the size of its text in bytes, for progress and disk space."""

    config: str
    size: int


class Named(NamedTuple):
    """A data set on the hub: its repository, its samples (the first is the default), the tokens held out of it."""

    repository: str
    samples: dict[str, Sample]
    validation_tokens: int


_BYTES_PER_TOKEN = 4.7
"""Of FineWeb-Edu's text in GPT-2 tokens, about."""

NAMED = {
    "fineweb-edu": Named(
        "HuggingFaceFW/fineweb-edu",
        {f"{n}BT": Sample(f"sample-{n}BT", int(n * 1e9 * _BYTES_PER_TOKEN)) for n in (10, 100, 350)},
        validation_tokens=100_000_000,  # the 0.1B of arXiv:2601.00417
    ),
}
