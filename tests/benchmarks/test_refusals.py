"""Settings of a benchmark that cannot be used are refused in one line, before anything is measured."""

import pytest

from benchmarks.__main__ import run
from residua.errors import InputError


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --presets dll", "did you mean 'ddl'"),
        ("generate --presets ddl:recompte=none", "did you mean recompute"),
        ("generate --presets ddl:recompute", "must be NAME:OPTION=VALUE"),
        ("generate --batch-sizes 1 0", "batch_sizes must be at least 1, got 0"),
        ("generate --new-tokens 0", "new_tokens must be at least 1, got 0"),
        ("generate --warmup -1", "warmup must be 0 or more, got -1"),
        ("ops --operations delta_right", "no operation is called 'delta_right'"),
        ("ops --operations connection:dll", "did you mean 'ddl'"),
        ("ops --tokens 0", "tokens must be at least 1, got 0"),
        ("ops --tokens 13 --sequence-length 6", "tokens must be a multiple of the sequence length 6: 13"),
        ("ops --rounds 0", "rounds must be at least 1, got 0"),
        ("ops --warmup -1", "warmup must be 0 or more, got -1"),
        ("peers --packages numpy", r"packages must be hyper-connections, .*, got 'numpy'"),
    ],
)
def test_unusable_values_are_refused(command, message):
    with pytest.raises(InputError, match=message):
        run(command.split())
