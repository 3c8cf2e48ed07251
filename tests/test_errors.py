"""The hint to install an extra is given for its own packages alone; a mapping from outside becomes a dataclass."""

from dataclasses import dataclass
from typing import Literal

import pytest

from residua.errors import (
    Count,
    InputError,
    NotInstalled,
    Positive,
    check_types,
    decoded,
    did_you_mean,
    extra,
    keywords,
    shown,
)


@pytest.mark.parametrize(("name", "package"), [("lab", "yaml"), ("eval", "lm_eval"), ("eval", "transformers")])
def test_a_package_of_the_extra_is_named_with_the_command_that_installs_it(name, package):
    message = rf'^{package} is not installed; .* pip install "\.\[{name}\]"'
    with pytest.raises(NotInstalled, match=message), extra("lab"), extra(name):
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)


@pytest.mark.parametrize("package", ["regex", "transformers.cache_utils", "residua.absent", None])
def test_an_error_inside_an_installed_package_comes_through(package):
    """If a package of the extra lacks something itself, or a part that another version has, its own error is raised."""
    error = ModuleNotFoundError(f"No module named {package!r}", name=package)
    with pytest.raises(ModuleNotFoundError) as caught, extra("lab"):
        raise error
    assert caught.value is error


@dataclass(frozen=True)
class Lamp:
    watts: Count
    colour: Literal["red", "white"] = "white"
    height: Positive | None = None

    def __post_init__(self) -> None:
        check_types(self)


def test_a_mapping_is_converted_to_an_object():
    assert decoded({"watts": 5, "height": 2}, Lamp) == Lamp(5, height=2)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "room.lamp must be a mapping of keys to values, got None"),
        ({}, "room.lamp.watts must be a whole number, got None"),
        ({"watts": True}, "room.lamp.watts must be a whole number, got True"),
        ({"watts": 0}, "room.lamp.watts must be at least 1, got 0"),
        ({"watts": 1, "color": "red"}, "unknown key room.lamp.color; did you mean colour?"),
        ({"watts": 1, "colour": "blue"}, "room.lamp.colour must be one of red, white, got 'blue'"),
        ({"watts": 1, "height": "low"}, "room.lamp.height must be a number or null, got 'low'"),
        ({"watts": 1, "height": -1}, "room.lamp.height must be a positive number, got -1"),
    ],
)
def test_a_wrong_mapping_gives_a_one_line_error_with_the_dotted_key(document, message):
    with pytest.raises(InputError) as error:
        decoded(document, Lamp, "room.lamp")
    assert str(error.value) == message


@dataclass(frozen=True)
class Room:
    lamp: Lamp


def test_a_missing_mapping_is_named_with_the_keys_that_it_needs():
    with pytest.raises(InputError, match=r"^lamp must be a mapping with watts, got None$"):
        decoded({}, Room)


@keywords
def turn(connection, *, num_layers=1):
    """Return the arguments."""
    return connection, num_layers


def test_an_unknown_keyword_gives_the_nearest_one_or_all_of_them():
    assert turn("mhc", num_layers=2) == turn(connection="mhc", num_layers=2) == ("mhc", 2)
    with pytest.raises(TypeError, match=r"turn takes no argument 'layers'; did you mean num_layers\?"):
        turn("mhc", layers=2)
    assert did_you_mean("train.learning_rate", ["train.min_lr_ratio", "train.lr"]) == "; did you mean train.lr?"
    with pytest.raises(TypeError, match=r"'device'; it takes connection, num_layers; .*'ddl-tc:beta_init=0.5'$"):
        turn("mhc", device="cpu")


def test_a_value_is_shown_in_one_line():
    class Tall:
        def __repr__(self):
            return "Tall(\n  head\n)"

    assert shown(Tall()) == "Tall( head )"
    assert shown("a\nb") == r"'a\nb'"
