"""The options for the keys of a configuration."""

import pytest

from residua.commands.configuration import COMMON, Configuration
from residua.commands.signature import call, command_parser
from residua.errors import InputError
from residua.lab.training import load_config
from residua.lab.training.config import KEYS


def command(*, configuration: Configuration):
    """Return the configuration.

    Examples:
        residua command
    """
    return configuration


def help_of(*, everything):
    return " ".join(command_parser("residua command", command, everything=everything).format_help().split())


def test_options_become_overrides_and_the_last_of_several_wins():
    parser = command_parser("residua command", command)
    line = ["--config", "tiny", "--train.lr", "3e-4", "--config", "small", "--train.seed=-1"]
    found = call(command, parser.parse_args(line))
    assert (found.config, found.overrides) == (("tiny", "small"), ("--train.lr=3e-4", "--train.seed=-1"))
    assert call(command, parser.parse_args([])) == Configuration()


def test_the_help_describes_each_key():
    text = help_of(everything=True)
    assert all(f"--{key} " in text for key in KEYS)
    assert {key for key in KEYS if f"--{key} " in help_of(everything=False)} == COMMON
    for expected in (
        "--model.vocab_size N rows of the embedding; null for the tokenizer's, rounded up (default: null)",
        "--model.hidden_size N width d (default: 768; tiny: 128; nano: 32)",
        "--model.rope_theta X base of the rotary frequencies (default: 10000.0)",
        "another 1 / sqrt(num_hidden_layers) (default: 0.5)",
    ):
        assert expected in text
    assert "(default: ddl; tiny: residual; nano: residual)" in text


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("train.precision", "float32|bfloat16"),
        ("train.device", "auto|cpu|cuda"),
        ("train.compile", "true|false"),
        ("model.qk_norm", "post_rope|pre_rope|null"),
        ("model.state_dtype", "float32|bfloat16|null"),
    ],
)
def test_the_help_lists_the_values_of_a_key(key, choices):
    assert f"--{key} {choices}" in help_of(everything=True)
    section, _, name = key.partition(".")
    for choice in choices.split("|"):
        taken = getattr(getattr(load_config(None, [f"--{key}={choice}"]), section), name)
        assert taken == {"null": None, "true": True, "false": False}.get(choice, choice)
    with pytest.raises(InputError, match=key):
        load_config(None, [f"--{key}=something"])
