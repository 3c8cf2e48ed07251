"""The pytest plugin: every check of a scheme or of a module is a separate test.

    @pytest.mark.residua_scheme(Momentum(), Momentum(friction=0.1))
    def test_contract(residua_check):
        residua_check()

`expected_failures={"causal": "the reason"}` in a mark is strict: it is an error if one of these checks passes. `dim=48`
in a mark of schemes is their width.

If residua is installed, pytest has the fixture and the marks without an import. Checks that call a compiler run only
with `pytest --residua-compile`.
"""

from collections.abc import Callable

import pytest

MARKS = {
    "residua_scheme": "(*schemes, expected_failures, dim): `residua_check` is each check of the contract of each",
    "residua_module": "(*adapters, expected_failures): `residua_check` is each check of the module of each adapter",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("residua").addoption(
        "--residua-compile", action="store_true", help="residua_check: also check under torch.compile"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, words in MARKS.items():
        config.addinivalue_line("markers", f"{name}{words}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "residua_check" not in metafunc.fixturenames:
        return
    from residua.testing import contract, module
    from residua.testing.checks import expect_names

    suites: dict[str, Callable[..., dict]] = {"residua_scheme": contract.checks, "residua_module": module.checks}
    subjects = {"residua_scheme": contract.expect_scheme, "residua_module": module.expect_adapter}
    where = metafunc.definition.nodeid
    marked = [mark for mark in metafunc.definition.iter_markers() if mark.name in MARKS]
    if not marked:
        raise pytest.UsageError(f"{where}: residua_check needs one of the marks {list(MARKS)}")
    compiled = metafunc.config.getoption("--residua-compile")
    cases = []
    for mark in marked:
        options = {key: value for key, value in mark.kwargs.items() if key != "expected_failures"}
        if not mark.args or options.keys() - ({"dim"} if mark.name == "residua_scheme" else set()):
            raise pytest.UsageError(f"{where}: the mark must be {mark.name}{MARKS[mark.name].partition(':')[0]}")
        expected = mark.kwargs.get("expected_failures", {})
        try:
            expect_names(expected, suites[mark.name](compiled=True))
            for subject in mark.args:
                subjects[mark.name](subject)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"{where}: {error}") from error
        for i, subject in enumerate(mark.args):
            name = type(subject).__name__ + (f"{i + 1}" if len(mark.args) > 1 else "")
            for check, function in suites[mark.name](compiled=compiled, **options).items():
                strict = [pytest.mark.xfail(reason=expected[check], strict=True)] if check in expected else []
                cases.append(pytest.param((function, subject), id=f"{name}-{check}", marks=strict))
    metafunc.parametrize("residua_check", cases, indirect=True)


@pytest.fixture
def residua_check(request: pytest.FixtureRequest):
    """Run one check of the scheme or module in the mark of this test; skip if it does not apply."""
    from residua.testing.checks import NotChecked

    function, subject = request.param

    def check() -> None:
        __tracebackhide__ = True
        try:
            function(subject)
        except NotChecked as reason:
            pytest.skip(str(reason))

    return check
