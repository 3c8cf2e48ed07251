"""Read untrusted JSON and YAML files: return plain data, or raise an InputError that names the file.

Nothing in a file is executed: YAML is read as by `yaml.safe_load`. Time and memory are bounded: only regular files are
opened, and the size and depth of documents are limited.
"""

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from residua.errors import InputError, extra, mapping, require

LARGEST = 2**26
"""The largest JSON file, in characters: enough for an index with half a million shards."""
LARGEST_YAML = 2**20
"""The largest YAML document, in characters, before and after the expansion of aliases. People write these by hand."""
LARGEST_MODEL_FILE = 2**30
"""The largest text file in a transformers folder, such as tokenizer.json, in bytes."""
SHARDS = ".index.json"
"""The end of the names of the indices of weights in several files."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The one folder in a transformers folder from which transformers reads without being asked."""
DEEPEST = 100
"""The deepest nesting of mappings and lists."""


def regular(path: Path) -> Path:
    """Return `path` if it is a regular file. Opening a pipe could wait for ever, and a device may have no end.

    Raises:
        OSError: the file does not exist, or is a folder, a pipe or a device.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a pipe or a device in the place of a file", str(path))
    return path


def expect_regular(folder: Path) -> None:
    """Check the files of a transformers folder before transformers opens them.

    Raises:
        InputError: the folder, or its folder of chat templates, contains a pipe or a device, or a text file above
            `LARGEST_MODEL_FILE`; or an index of weights names a file that is not directly in the folder.
    """
    for path in (*_entries(folder), *_entries(folder / CHAT_TEMPLATES)):
        if path.exists() and not path.is_dir():
            try:
                size = regular(path).stat().st_size
            except OSError as error:
                raise InputError(f"{path} must be a file, got: {error.strerror}") from error
            text = path.suffix in (".json", ".txt", ".model", ".jinja")
            require(not text or size <= LARGEST_MODEL_FILE, str(path), f"at most {LARGEST_MODEL_FILE} bytes", size)
            if path.name.endswith(SHARDS):
                shards = mapping(mapping(read_json(path), str(path)).get("weight_map"), f"{path}: weight_map")
                for name in shards.values():
                    inside(folder, name)


def _entries(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


def inside(folder: Path, name: object) -> Path:
    """Return the path of the entry `name` of `folder`; the name was read from a file.

    Raises:
        InputError: `name` leads outside the folder, such as "../x" and "/x".
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    require(plain, f"{folder}: an entry that a file names", "in this folder", name)
    return folder / str(name)


def read_text(path: str | os.PathLike[str], what: str = "text", *, pipe: bool = False) -> str:
    """Return the content of a file in UTF-8, of at most `LARGEST` characters.

    what: the expected content, such as "YAML", for the message of an error.
    pipe: also accept a pipe such as /dev/stdin; set it only for a path that the user names on the command line.

    Raises:
        InputError: the file does not exist, is a folder, is not UTF-8, or is too long.
    """
    path = Path(path)
    try:
        with (path if pipe else regular(path)).open(encoding="utf-8-sig") as file:
            text = file.read(LARGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "bytes that are not UTF-8"
        raise InputError(f"{path} cannot be read as {what}: {reason}") from error
    if len(text) > LARGEST:
        raise InputError(f"{path} must be {what} of at most {LARGEST} characters, got more")
    return text


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value of a JSON file. Raises InputError as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, "JSON"), path)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return the value of a YAML file. Raises InputError as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path, "YAML"), path)


def parse_json(text: str, source: object) -> Any:
    """Return the value of a JSON text. Raises InputError for invalid text; the message names `source`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} must be JSON, got: {_reason(error)}") from error
    if text.count("[") + text.count("{") > DEEPEST:
        _expect_shallow(value, source)
    return value


def _expect_shallow(value: Any, source: object) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [item for item in level if isinstance(item, (dict, list))]
        containers, level = (
            level,
            [part for item in level for part in (item.values() if isinstance(item, dict) else item)],
        )
    if containers:
        raise InputError(f"{source} must be JSON at most {DEEPEST} levels deep, got deeper")


def parse_yaml(text: str, source: object) -> Any:
    """Return the value of a YAML document of plain values.

    3e-4 is a number, as in YAML 1.2. Dates are text, and so are 1:30, 010 and 0o17. A key is text as it is written.

    Raises:
        InputError: the text is not YAML, has a language-specific tag or a duplicate key, or is too long or too deep.
            `source` is the name of the text in the message.
    """
    with extra("lab"):
        import yaml

    try:
        _expect_small(len(text))
        return yaml.load(text, _loader())
    except (yaml.YAMLError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{source} must be YAML, got: {_reason(error)}") from error


NULLS = ("null", "~")


def readings(text: str, source: object) -> list[Any]:
    """Return what a text that a user typed may mean: its value as YAML, unless that is text too, and the text itself.

    A text that YAML reads as nothing, such as the comment "#data", is only text.
    """
    try:
        plain = parse_yaml(text, source)
    except InputError:
        return [text]
    nothing = plain is None and text.strip().lower() not in NULLS
    return [text] if nothing or isinstance(plain, str) else [plain, text]


def write_yaml(value: Any) -> str:
    """Return plain values as a YAML document that keeps the order of mappings.

    Texts that YAML 1.1 or 1.2 would read as something else are quoted.
    """
    with extra("lab"):
        import yaml

    return yaml.dump(value, Dumper=_dumper(), sort_keys=False)


@cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    first = {*yaml.SafeDumper.yaml_implicit_resolvers, *_loader().yaml_implicit_resolvers}
    Dumper.yaml_implicit_resolvers = {
        character: [
            *yaml.SafeDumper.yaml_implicit_resolvers.get(character, []),
            *_loader().yaml_implicit_resolvers.get(character, []),
        ]
        for character in first
    }
    return Dumper


def _reason(error: Exception) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem:  # str() of PyYAML's error has several lines
        reason = f"{problem}, line {mark.line + 1}" if mark else str(problem)
        return f"{reason}; indent with spaces instead of tabs" if r"'\t'" in reason else reason
    return " ".join(str(error).split())


def _expect_small(size: int) -> None:
    if size > LARGEST_YAML:
        raise ValueError(f"more than {LARGEST_YAML} characters, with aliases replaced by their values; shorten it")


DROPPED = ("timestamp", "binary", "set", "omap", "pairs")
"""The YAML types that JSON lacks."""
PLAIN = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "null"))
"""The tags of plain values other than text. As a key, such a value is the name of something, such as 10 or no."""


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, stream: str):
            super().__init__(stream)
            self._extents: dict[int, tuple[int, int]] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Return the next node, and count its characters and levels as if aliases were expanded."""
            alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if id(node) not in self._extents:
                if alias:
                    raise ValueError("an alias inside the value to which it refers")
                self._extents[id(node)] = self._extent(node)
            return node

        def _extent(self, node: Any) -> tuple[int, int]:
            if isinstance(node, yaml.ScalarNode):
                return 1 + len(node.value), 0
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(part,) for part in node.value]
            extents = [self._extents[id(part)] for pair in pairs for part in pair]
            size, depth = 1 + sum(size for size, _ in extents), 1 + max((depth for _, depth in extents), default=0)
            _expect_small(size)
            if depth > DEEPEST:
                raise ValueError(f"more than {DEEPEST} nested levels")
            return size, depth

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            duplicate = next((name for name, count in names.items() if count > 1), None)
            if duplicate is not None:
                raise ValueError(f"the key {duplicate} is twice in a mapping")
            for key, _ in node.value:
                if key.tag in PLAIN:
                    key.tag = "tag:yaml.org,2002:str"
            return node

        def construct_yaml_int(self, node: Any) -> int:
            number = int(super().construct_yaml_int(node))
            str(number)  # raises here for thousands of digits, not later in a message
            return number

    numbers = {
        "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$",
        "tag:yaml.org,2002:float": r"""(?x)[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$
            | [-+]?[0-9]+[eE][-+]?[0-9]+$ | [-+]?\.(inf|Inf|INF)$ | \.(nan|NaN|NAN)$""",
    }
    dropped = {f"tag:yaml.org,2002:{kind}" for kind in DROPPED}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in numbers and tag not in dropped]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.yaml_constructors = {
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag not in dropped
    } | {"tag:yaml.org,2002:int": Loader.construct_yaml_int}
    for tag, pattern in numbers.items():
        Loader.add_implicit_resolver(tag, re.compile(pattern), list("-+.0123456789"))
    return Loader
