"""What the site says is true and whole: links, drawings, tables, and the pages that code makes."""

import ast
import builtins
import os
import re
import sys
from dataclasses import fields

import pytest

from residua.connections import PRESETS, SCHEMES
from support.pages import DOCS, ROOT, TOOLS, blocks, cells, pages, script
from tools.drawings import PICTURES

PAGES = pages()


@pytest.fixture(scope="module")
def scheme_pages():
    """The module that generates the pages of schemes."""
    return script("scheme_pages", DOCS)


@pytest.fixture(scope="module")
def hooks(scheme_pages):
    """The module that adds pages to the site."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    return script("hooks", DOCS)


def test_the_notebook_is_the_tutorial():
    """`python docs/notebook.py` writes it; tests/test_docs.py runs its cells."""
    module = script("notebook", DOCS)
    assert (DOCS / "tutorial.ipynb").read_text(encoding="utf-8") == module.notebook(PAGES["docs/tutorial.md"])
    assert cells(DOCS / "tutorial.ipynb") == [module.INSTALL, *blocks(PAGES["docs/tutorial.md"], "python")]


def test_the_notebook_installs_the_wheel_beside_it_or_else_from_the_repository(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: called.append(command[-2]))
    monkeypatch.chdir(tmp_path)
    exec(script("notebook", DOCS).INSTALL, {})
    (tmp_path / "residua-0.1.0-py3-none-any.whl").touch()
    exec(script("notebook", DOCS).INSTALL, {})
    assert called == ["residua @ git+https://github.com/OWNER/residua", "residua-0.1.0-py3-none-any.whl"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_drawing_is_the_output_of_its_script(name):
    """`python tools/drawings.py` makes it from the records."""
    assert (DOCS / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name]()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads TOML, and qualifies names of code, from 3.11 on")
@pytest.mark.parametrize("name", ["architecture-rooms", "architecture-calls"])
def test_a_drawing_of_the_architecture_matches_the_code(name):
    """`python tools/architecture.py` makes it from the contracts and from calls."""
    assert (DOCS / f"{name}.svg").read_text(encoding="utf-8") == script("architecture", TOOLS).PICTURES[name]()


@pytest.mark.parametrize("name", SCHEMES)
def test_the_equation_of_a_scheme_becomes_a_formula(name, scheme_pages):
    """Greek letters, roots and subscripts are LaTeX, and nothing of the equation is lost."""
    latex = script("formulas", DOCS).latex_of(SCHEMES[name].equation)
    assert latex.count("{") == latex.count("}")
    assert latex.count(r"\lVert") == latex.count(r"\rVert")
    assert not re.search(r"(?<!\\)\b(alpha|beta|gamma|lambda|mu|rho|sigma|tau|theta|sqrt|h_res)\b", latex)
    letters = re.sub(r"\\(text|tilde|lVert|rVert|langle|rangle|cdot|le|leftarrow)\b|[^A-Za-z]", "", latex)
    assert letters == re.sub(r"[^A-Za-z]", "", SCHEMES[name].equation)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_has_a_target(page):
    """The target is a file of the repository, or a folder that has a page on the site."""
    code = (DOCS / "hooks.py").read_text(encoding="utf-8")
    pages_of_folders = ast.literal_eval(re.search(r"^FOLDERS = ({.*?^})", code, re.MULTILINE | re.DOTALL)[1])
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.is_file() or f"../{os.path.relpath(found, ROOT)}" in pages_of_folders, target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def test_the_schemes_are_listed_with_their_state_and_their_parameters(scheme_pages):
    """The parameters that a scheme adds to the plain residual at the paper's two sizes, counted on the whole model."""
    from residua.lab.cost.estimate import parameters
    from residua.models import SIZES, ResiduaConfig

    pattern = r"^\| `([a-z-]+)` \| .* \| (d|\d+d|\d*d to \d+d) \| ([\d,]+)(?: / ([\d,]+))? \|$"
    rows = re.findall(pattern, PAGES["docs/schemes.md"], flags=re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(PRESETS)
    sizes = [SIZES[name] for name in ("small", "medium")]
    totals = {name: [parameters(ResiduaConfig(connection=name, **size))["total"] for size in sizes] for name in PRESETS}
    for name, state, small, medium in rows:
        assert state == scheme_pages.state(PRESETS[name])
        told = [int(count.replace(",", "")) for count in (small, medium or small)]
        assert told == [total - plain for total, plain in zip(totals[name], totals["residual"])], name


@pytest.mark.parametrize("name", SCHEMES)
def test_the_page_of_a_scheme_is_complete(name, scheme_pages):
    """Its code runs and prints, every preset has a row, and every option a meaning."""
    page = scheme_pages.page(name)
    assert scheme_pages.displayed(SCHEMES[name].equation) in page
    assert "torch.Size([2, 16, 64])" in page
    for preset, scheme in PRESETS.items():
        assert (f"\n| `{preset}` | " in page) or type(scheme) is not SCHEMES[name]
    for field in fields(SCHEMES[name]):
        assert scheme_pages.meaning(SCHEMES[name], field.name), field.name


def test_the_page_of_a_scheme_lists_its_results_from_every_page(scheme_pages):
    """A page says that nothing was trained only if no table has a row for its scheme."""
    without = {name for name in SCHEMES if "We have not trained it" in scheme_pages.results(name)}
    trained = {"residual", "lambdas", "hyper", "mhc", "attnres", "mudd", "gated_delta", "gated_orthogonal", "edelta"}
    assert not without & trained
    labels = {row.scheme for row in scheme_pages.resbench().rows if row.whole}
    assert len(labels) > 30
    for label in labels:
        assert f"`{label}`" in scheme_pages.results(scheme_pages.scheme_of(label)), label


def test_a_scheme_named_in_other_titles_is_named_in_its_own_title(scheme_pages):
    """Otherwise a search for it finds the others first. The search sees the words that its separator leaves."""
    separator = re.search(r"separator: '(.*)'", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))[1]
    for name in SCHEMES:
        if any(name in scheme_pages.title(other).lower() for other in SCHEMES if other != name):
            assert name in re.split(separator, scheme_pages.heading(name).lower())
    assert "boost" in scheme_pages.heading("mhc")


def test_the_distance_of_a_scheme_from_the_plain_residual_at_its_start_is_measured(scheme_pages):
    assert scheme_pages.start(PRESETS["residual"]) == "0"
    assert float(scheme_pages.start(PRESETS["hc"])) < 1e-6
    assert float(scheme_pages.start(PRESETS["ddl"])) > 0.1


def test_the_home_page_links_within_the_site_and_the_examples_are_copied_whole(hooks):
    home = hooks.home()
    assert "](docs/" not in home
    assert "](results.md)" in home
    assert "](examples.md)" in home
    assert hooks.inside("../examples") == "examples.md"
    assert {"CITATION.cff", "experiments/LOG.md"} <= hooks.outside()
    for name in hooks.EXAMPLES:
        assert (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()[-1] in hooks.examples()


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>Take <code>ddl-tc</code>.</p>", '<p>Take <a href="../schemes/deep_delta/"><code>ddl-tc</code></a>.</p>'),
        ("<td><code>lambdas+tc</code></td>", '<td><a href="../schemes/lambdas/"><code>lambdas+tc</code></a></td>'),
        ("<td><code>residual-stream</code> <code>norm</code></td>", None),
        ('<a href="x"><code>mhc</code></a>', None),
        ("<pre><code>mhc</code></pre>", None),
        ("<h2><code>mhc</code></h2>", None),
    ],
)
def test_the_name_of_a_preset_links_to_its_page(html, expected, hooks):
    """In text or in a table, if the name stands by itself and is not a link yet."""
    assert hooks.with_presets(html, "faq/") == (expected or html)


def test_the_page_of_a_scheme_does_not_link_to_itself(hooks):
    found = hooks.with_presets("<code>mhc</code> <code>hc</code>", "schemes/mhc/")
    assert found == '<code>mhc</code> <a href="../hyper/"><code>hc</code></a>'


def test_the_repository_has_one_address_and_no_page_installs_residua_from_an_index():
    """Until a person publishes: pyproject.toml has the address with a placeholder, and everything else repeats it."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = re.search(r'^Repository = "https://(.*)"$', project, re.MULTILINE)[1]
    files = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")]
    files += [*PAGES.values(), (DOCS / "tutorial.ipynb").read_text(encoding="utf-8")]
    for text in files:
        assert set(re.findall(r"github\.com/[\w-]+/residua\b", text)) <= {address}
        assert not re.search(r"(pip|uv) install [^\n`]*(?<![\w./-])['\"]?residua\b(?! @)", text)
        assert 'default: "residua' not in text


def test_every_name_in_the_adapters_for_other_packages_is_defined():
    """They cannot run here: every name in them is imported, defined or built in."""
    foreign = [
        block for block in blocks(PAGES["docs/testing.md"], "py") if re.search("^from (megatron|fla)", block, re.M)
    ]
    assert len(foreign) == 2
    for block in foreign:
        nodes = list(ast.walk(ast.parse(block)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        bound |= {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.alias))}
        assert {node.id for node in names} <= bound


def deviations() -> dict[int, str]:
    return {int(number): row for number, row in re.findall(r"^\| (\d+) \| (.*) \|$", PAGES["docs/deviations.md"], re.M)}


def test_the_rows_of_the_deviations_are_numbered_in_order():
    numbers = re.findall(r"^\| (\d+) \|", PAGES["docs/deviations.md"], flags=re.MULTILINE)
    assert len(numbers) > 50
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))
    assert f"every difference listed: {len(numbers)} points" in PAGES["docs/deviations.md"]


def test_every_scheme_belongs_to_a_family(scheme_pages):
    """The site lists schemes without a family under "More", so that a new scheme is not lost."""
    assert sorted(name for members in scheme_pages.families().values() for name in members) == sorted(SCHEMES)


def test_citations_of_deviations_name_the_right_rows():
    ((first, last),) = re.findall(r"\(deviations\.md\), rows (\d+) to (\d+)", PAGES["docs/geometry.md"])
    cited = [deviations()[number].split(" | ")[:2] for number in range(int(first), int(last) + 1)]
    assert cited == [["EDelta", "initial gate"], ["EDelta", "initial rotation"], ["EDelta", "H_pre, H_post"]]
