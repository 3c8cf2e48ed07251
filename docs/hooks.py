"""What the site has beside the files of docs/: the home page, the examples, a page per scheme, the explorer, ResBench's
report, and copies of linked files. Formulas become MathML, and names of presets links.
"""

import ast
import posixpath
import re
import sys
from html import escape
from importlib.metadata import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

DOCS = Path(__file__).parent
ROOT = DOCS.parent
EXAMPLES = (
    "convert_llama.py",
    "vision_transformer.py",
    "graph.py",
    "any_network.py",
    "custom_scheme/momentum_residual.py",
    "custom_scheme/use.py",
    "check_module.py",
)
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "resbench/methods.md": "resbench-methods.md",
    "resbench/evidence.md": "resbench-evidence.md",
    "experiments/speed.md": "speed-tables.md",
    "experiments/geometry/details.md": "geometry-tables.md",
}
"""The pages of the repository outside docs/, and their names in the site."""
FOLDERS = {
    "../examples": "examples.md",
    "../resbench/records/main": "resbench-report.html",
}
"""The folders of the repository that pages link to, and the pages in their place."""
BUTTONS = (
    "[Try it live](explorer/index.html){ .md-button .md-button--primary }\n"
    "[DDL in ten minutes](tutorial.md){ .md-button }\n"
    "[Which residual?](which.md){ .md-button }"
)
DRAWING = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*([\w-]+)\.svg" ?/?>')
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
NAME = re.compile(r"(<(a|pre|h\d)\b.*?</\2>)|<code>([a-z][\w+-]*)</code>", re.DOTALL)
LONG = re.compile(r"(?<=<code>)[^<]{25,}(?=</code>)")
CARD = """\
<meta property="og:title" content="{title}">
<meta property="og:description" content="{description}">
<meta property="og:image" content="{site}card.png">
<meta name="twitter:card" content="summary_large_image">
</head>"""

sys.path[:0] = [str(DOCS), str(ROOT / "src"), str(ROOT / "experiments")]

import scheme_pages  # noqa: E402
from formulas import Formulas, labelled  # noqa: E402

import residua  # noqa: E402
from residua.connections import PRESETS  # noqa: E402
from residua.lab.explorer import write_page  # noqa: E402
from residua.lab.explorer.collect import page_of  # noqa: E402
from residua.lab.study.report import page as study_page  # noqa: E402
from residua.lab.study.report import payload  # noqa: E402


def on_config(config):
    """Name the version and the project's addresses, and list the pages of schemes by family."""
    config.site_name = f"residua {residua.__version__}"
    addresses = dict(url.split(", ", 1) for url in metadata("residua").get_all("Project-URL", []) if "OWNER" not in url)
    config.repo_url, config.site_url = addresses.get("Repository"), addresses.get("Documentation")
    section = next(pages for item in config.nav for title, pages in item.items() if title == "Schemes")
    for family, names in scheme_pages.families().items():
        section.append({family: [{scheme_pages.title(name): f"schemes/{name}.md"} for name in names]})
    return config


def on_files(files, config):
    """Add the generated pages, and every file outside docs/ that a page links to."""
    pages = {
        "index.md": home(),
        "examples.md": examples(),
        "explorer/index.html": explorer(),
        FOLDERS["../resbench/records/main"]: study_page(payload(scheme_pages.resbench())),
    }
    pages |= {page: from_outside(name) for name, page in OUTSIDE.items()}
    pages |= {f"schemes/{name}.md": scheme_pages.page(name) for name in scheme_pages.names()}
    files.remove(files.get_file_from_path("deviations.md"))
    pages["deviations.md"] = scheme_pages.index()
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for target in sorted(outside()):
        files.append(File.generated(config, copied(target), content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links that leave docs/ to the copies, and take the formulas out."""
    page.formulas = Formulas()
    return page.formulas.taken_out(LINK.sub(lambda match: f"]({inside(match[1])}", markdown))


def on_page_content(html, page, config, files):
    """Put in the formulas, the drawings, so that they have the colours of the theme, the links of presets, and the
    headings of cells.
    """
    html = DRAWING.sub(lambda match: drawing(match[2], match[1]), page.formulas.put_back(html))
    return labelled(breakable(html if page.url.startswith("api") else with_presets(html, page.url)))


def on_post_page(output, page, config):
    """Add the card that other sites show for a link to the page; it needs the site's address."""
    if not config.site_url:
        return output
    title = escape(f"{page.title} · {config.site_name}")
    card = CARD.format(title=title, description=config.site_description, site=config.site_url)
    return output.replace("</head>", card)


def with_presets(html: str, url: str) -> str:
    """Link the names of presets, and ResBench's names of their forms, to the pages of their schemes."""

    def link(match: re.Match[str]) -> str:
        name = scheme_of(match[3]) if match[3] else None
        target = f"schemes/{name}/"
        if name is None or target == url:
            return match[0]
        return f'<a href="{get_relative_url(target, url)}">{match[0]}</a>'

    return NAME.sub(link, html)


def scheme_of(name: str) -> str | None:
    known = name in PRESETS or name in scheme_pages.resbench().study.schemes
    return scheme_pages.scheme_of(name) if known else None


def breakable(html: str) -> str:
    """Let long code break behind its punctuation, so that it does not push the columns of a table out of the page."""
    return LONG.sub(lambda match: re.sub(r"(?<=[/_.])(?=\w)", "<wbr>", match[0]), html)


def drawing(name: str, text: str) -> str:
    svg = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)


def home() -> str:
    """Return the README as the site has it, with buttons below its first paragraph."""
    title, pitch, rest = from_outside("README.md").split("\n\n", 2)
    page = f"---\nhide: [navigation]\n---\n\n{title}\n\n{pitch}\n\n{BUTTONS}\n\n{rest}"
    return LINK.sub(lambda match: f"]({inside(match[1])}", page)


def from_outside(name: str) -> str:
    """Return a page of the repository outside docs/ with its links seen from docs/."""
    text, folder = (ROOT / name).read_text(encoding="utf-8"), posixpath.dirname(name)
    return LINK.sub(lambda match: f"]({seen_from_docs(posixpath.join(folder, match[1]))}", text)


def seen_from_docs(target: str) -> str:
    return posixpath.relpath(target, "docs")


def explorer() -> str:
    """Return the explorer's page as `residua explore` writes it without a run, with the way back to the site."""
    payload, arrays = page_of(())
    with TemporaryDirectory() as folder:
        page = write_page(Path(folder) / "explorer.html", {**payload, "home": "../index.html"}, arrays)
        return page.read_text(encoding="utf-8")


def examples() -> str:
    """Return a page with the code of every example below its docstring."""
    parts = ["# Examples\n\nEach runs on a CPU in seconds, and a test runs it.\n"]
    for name in EXAMPLES:
        source = (ROOT / "examples" / name).read_text(encoding="utf-8")
        told = ast.get_docstring(ast.parse(source)) or ""
        code = source.split('"""', 2)[2].strip()
        heading, _, rest = told.partition("\n\n")
        title = Path(name).stem.replace("_", " ").capitalize()
        parts.append(f"## {title}\n\n{fenced(heading)}\n\n{fenced(rest)}\n\n```python\n{code}\n```\n")
        beside = (ROOT / "examples" / name).with_name("pyproject.toml")
        if beside.exists():
            parts.append(f"pyproject.toml beside it:\n\n```toml\n{beside.read_text(encoding='utf-8').strip()}\n```\n")
    return "\n".join(parts)


def fenced(text: str) -> str:
    """Put the indented blocks of a docstring between fences."""
    blocks = re.sub(r"(?m)^(?: {4}.*\n?)+", lambda match: f"```text\n{dedented(match[0])}\n```\n", text + "\n")
    return blocks.strip()


def dedented(block: str) -> str:
    return re.sub(r"(?m)^ {4}", "", block).rstrip()


def outside() -> set[str]:
    """Return the files of the repository outside docs/ that its pages link to, from the root."""
    texts = [
        *map(from_outside, ("README.md", *OUTSIDE)),
        *(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")),
    ]
    links = {target for text in texts for target in LINK.findall(text) if target.startswith("../")}
    targets = {target.removeprefix("../") for target in links} - OUTSIDE.keys()
    return {target for target in targets if (ROOT / target).is_file()}


def copied(target: str) -> str:
    """Return the place of a copy in the site. As text, a browser shows it instead of saving it."""
    return f"repository/{target}.txt"


def inside(target: str) -> str:
    """Return the link to the copy of a file outside docs/, or to the page for a folder; other links stay."""
    if target in FOLDERS:
        return FOLDERS[target]
    file = target.removeprefix("../")
    if target != file and file in OUTSIDE:
        return OUTSIDE[file]
    return copied(file) if target != file and (ROOT / file).is_file() else target
