"""The default corpus: the documentation that is part of every CPython installation."""

import ast
import importlib
import inspect
import platform
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from residua.errors import InputError
from residua.lab.data.corpus import Corpus, Document

_EXCLUDED = {"idlelib", "lib2to3", "turtledemo", "test"}
_TESTS = {"test", "tests"}
# Every build of CPython has these modules, and their docs do not depend on the platform.
_C_MODULES = (
    *("_bisect", "_codecs", "_collections", "_csv", "_datetime", "_decimal", "_functools", "_heapq", "_io"),
    *("_operator", "_pickle", "_random", "_signal", "_struct", "_thread", "_weakref", "array", "binascii", "builtins"),
    *("cmath", "gc", "itertools", "marshal", "math", "sys", "time", "unicodedata", "zlib"),
)
_C_MEMBERS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_SHORTEST = 40


def open_stdlib() -> Corpus:
    """Collect pydoc's topics, the docstrings in the standard library's sources, and the docs of modules written in C.

    The text is the same in every environment of one CPython build: nothing comes from site-packages, and sources are
    parsed, not imported, so that -OO changes nothing. Raises InputError if this Python lacks its topics or sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        topics = {}
    docstrings = list(_source_docs(folder))
    if not topics or not docstrings:
        missing = f"the sources of the standard library in {folder}" if topics else "pydoc_data.topics"
        raise InputError(f"source stdlib: this Python was installed without {missing}; give a file or folder of text")

    texts = [*_sections(topics), *docstrings, *_c_docs()]
    # Addresses in C docs differ between processes and are no use as text.
    texts = [re.sub(r"\bat 0x[0-9A-Fa-f]+", "at 0x...", text) for text in texts]
    documents = [Document(text, len(text.encode())) for text in dict.fromkeys(texts) if len(text) > _SHORTEST]
    python = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    return Corpus(
        name="stdlib",
        size=sum(document.size for document in documents),
        read=lambda: iter(documents),
        identity=python,
        facts=python,
    )


def _sections(topics: dict[str, str]) -> Iterable[str]:
    """Return each section of pydoc's topics once. Many topics repeat a section with another underline."""
    heading = re.compile(r"\n\n+(?=[^\n]+\n([*=~^-])\1{2,}\n)")
    sections: dict[str, str] = {}
    for _, topic in sorted(topics.items()):
        # The pattern's group makes re.split return the underline's character between sections.
        for section in heading.split(topic.strip())[::2]:
            _title, _, body = section.partition("\n")
            _underline, _, body = body.partition("\n")
            sections.setdefault(body.strip(), section)
    return sections.values()


def _source_docs(folder: Path) -> Iterator[str]:
    for name in sorted(sys.stdlib_module_names - _EXCLUDED):
        for source in [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]:
            if source.is_file() and _TESTS.isdisjoint(source.relative_to(folder).parts):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # invalid escapes in the standard library
                    tree = ast.parse(source.read_bytes())
                yield from _docstrings(tree)


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _docstrings(child)


def _c_docs() -> Iterator[str]:
    for name in _C_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        yield _doc(module)
        for _, member in sorted(vars(module).items()):
            # Programs may add names to these modules, and functions written in Python lose their docstrings under -OO.
            if isinstance(member, (type, *_C_MEMBERS)) and (member.__module__ or "").lstrip("_") == name.lstrip("_"):
                yield _doc(member)
                if isinstance(member, type):
                    yield from (_doc(part) for _, part in sorted(vars(member).items()) if isinstance(part, _C_MEMBERS))


def _doc(member: object) -> str:
    return inspect.cleandoc(member.__doc__) if isinstance(member.__doc__, str) else ""
