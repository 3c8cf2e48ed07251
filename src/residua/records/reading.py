"""Read JSON and YAML files of any origin: return plain data, or raise an InputError that names the file.

Nothing in a file is executed: YAML is read as by `yaml.safe_load`.
"""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from residua.errors import InputError, extra


def read_text(path: str | os.PathLike[str], what: str = "text") -> str:
    """Return the content of a file in UTF-8.

    Raises:
        InputError: there is no such file, it is a folder, or it is not UTF-8. `what` names what was expected.
    """
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "bytes that are not UTF-8"
        raise InputError(f"{path} must be {what}, got: {reason}") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value of a JSON file. Raises InputError as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, "JSON"), path)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return the value of a YAML file. Raises InputError as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path, "YAML"), path)


def parse_json(text: str, source: object) -> Any:
    """Return the value of a JSON text. Raises InputError for anything else; `source` names it in the message."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} must be JSON, got: {_reason(error)}") from error


def parse_yaml(text: str, source: object) -> Any:
    """Return the value of a YAML document of plain values.

    Numbers are those of YAML 1.2: 3e-4 is one, and 1:30, which YAML 1.1 takes for 90, is text.

    Raises:
        InputError: it is not YAML, or holds a tag of another language or a key twice. `source` names it in the message.
    """
    with extra("lab"):
        import yaml

    try:
        return yaml.load(text, _loader())
    except (yaml.YAMLError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{source} must be YAML, got: {_reason(error)}") from error


def write_yaml(value: Any) -> str:
    """Return plain values as a YAML document that keeps the order of mappings."""
    with extra("lab"):
        import yaml

    return yaml.safe_dump(value, sort_keys=False)


def _reason(error: Exception) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem:  # an error of PyYAML prints several lines
        return f"{problem}, line {mark.line + 1}" if mark else str(problem)
    return " ".join(str(error).split())


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            names = [key.value for key, _ in node.value]
            duplicate = next((name for name in names if names.count(name) > 1), None)
            if duplicate is not None:
                raise ValueError(f"the key {duplicate} twice in a mapping")
            return node

    numbers = {
        "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$",
        "tag:yaml.org,2002:float": r"""(?x)[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$
            | [-+]?[0-9]+[eE][-+]?[0-9]+$ | [-+]?\.(inf|Inf|INF)$ | \.(nan|NaN|NAN)$""",
    }
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in numbers]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in numbers.items():
        Loader.add_implicit_resolver(tag, re.compile(pattern), list("-+.0123456789"))
    return Loader
