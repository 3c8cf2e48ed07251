"""No module imports itself through others, imports inside functions included: a reader can start at the bottom."""

import ast
from pathlib import Path

import residua

PACKAGE = Path(residua.__file__).parent
MODULES = {
    ".".join(["residua", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(name: str) -> set[str]:
    """Return the modules of the package that one of them imports, anywhere in its file."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= names if names <= MODULES.keys() else {*names, source}  # a name that is no module is in `source`
    return (found & MODULES.keys()) - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that all reach each other."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            fresh = graph[todo.pop()] - seen
            seen |= fresh
            todo += fresh
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph}
    return sorted(list(group) for group in groups if group)


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(graph) == [["a", "b", "c"]]


def test_no_import_goes_in_a_circle():
    graph = {name: imported(name) for name in MODULES}
    assert graph["residua.ops.delta"] >= {"residua.ops.dispatch", "residua.ops.kernels.delta"}  # one inside a function
    assert circles(graph) == []
