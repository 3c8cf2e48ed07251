"""The options of commands that take the configuration of a run: recipes, YAML files, and one option for each key."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from residua.commands.signature import Option, metavar_of
from residua.errors import InputError
from residua.lab.training.config import KEYS, load_config, recipe_values

if TYPE_CHECKING:
    from residua.lab.training import RunConfig

COMMON = {
    *("model.connection", "model.num_hidden_layers", "model.hidden_size", "data.path"),
    *("train.steps", "train.batch_size", "train.sequence_length", "train.lr", "train.seed", "train.device"),
}
"""The keys that are changed most often; only `--help-all` shows the others."""
HELP_RECIPES = ("tiny", "nano", "small", "retrofit")
"""The recipes whose values the help of `COMMON` keys shows; the other recipes are variants of these four."""


def key_options() -> Iterator[Option]:
    """Yield an option for each key of a configuration."""
    recipes = {name: recipe_values(name) for name in HELP_RECIPES}
    for key, item in KEYS.items():
        values = {} if item.default is MISSING else {"default": item.default}
        if key in COMMON:
            values |= {
                name: given[key] for name, given in recipes.items() if given.get(key, item.default) != item.default
            }
        text = item.metadata["help"]
        if values:
            text += f" ({'; '.join(f'{name}: {_yaml_text(value)}' for name, value in values.items())})"
        settings = {
            "dest": "overrides",
            "action": "append",
            "type": f"--{key}={{}}".format,
            "metavar": "SCHEME" if key == "model.connection" else metavar_of(item.type),
            "help": text.replace("%", "%%"),
        }
        yield Option(f"--{key}", key.partition(".")[0], settings, rare=key not in COMMON)


@dataclass(frozen=True)
class Configuration:
    """The sources of a configuration; later ones override earlier ones.

    Args:
        config (NAME|FILE.yaml): a recipe (tiny, nano, small, medium, retrofit, ...) or a YAML file, or several
        print_config: print the resolved configuration and stop
        overrides: keys of the configuration and their values
    """

    config: tuple[str, ...] = ()
    print_config: bool = False
    overrides: Annotated[tuple[str, ...], key_options] = ()

    def load(self, *, needed: str, begun: Mapping[str, Any] = MappingProxyType({})) -> "RunConfig | None":
        """Return the configuration; with `print_config`, print it and return None.

        needed: the end of the message if no recipe or file is given
        begun: the settings of a run that resumes, see `load_config`

        Raises:
            InputError: a recipe, a file, a key or a value is wrong.
        """
        if not self.config and not self.print_config:
            raise InputError(f"--config NAME|FILE.yaml must say {needed}")
        config = load_config(self.config, self.overrides, begun=begun)
        if not self.print_config:
            return config
        print(config.to_yaml(), end="")
        return None


def _yaml_text(value: Any) -> str:
    """Format a value as in YAML and in overrides."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
