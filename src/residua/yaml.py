"""Read and write YAML as plain values. A document from a stranger executes nothing and cannot exhaust the memory."""

import re
from typing import Any

from residua.errors import InputError, extra

with extra("lab"):
    import yaml


def read_yaml(text: str, source: object) -> Any:
    """Return the values of a YAML document; `source` names it in errors.

    Raises:
        InputError: this is not YAML, it has aliases (a few lines of them can stand for gigabytes), or it is nested too
            deeply.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise InputError(f"{source}: expected YAML with a few levels, got one nested too deeply") from None
    except Exception as error:  # PyYAML raises what its constructors stumble over: ValueError, IndexError, KeyError
        raise InputError(f"{source}: expected YAML, got: {' '.join(str(error).split())}") from error


def write_yaml(values: Any) -> str:
    """Return plain values as YAML, mappings in their own order."""
    return yaml.safe_dump(values, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """The safe loader without aliases. YAML 1.1 reads 3e-4 as text; here it is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(None, None, f"an alias, *{event.anchor}; write the value out", event.start_mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
