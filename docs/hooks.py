"""What the site has beside the files of docs/: the home page, the examples, a page per scheme, ResBench's report, and
copies of linked files.
"""

import ast
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
EXAMPLES = (
    "convert_llama.py",
    "vision_transformer.py",
    "graph.py",
    "custom_scheme/momentum_residual.py",
    "custom_scheme/use.py",
    "check_module.py",
)
FOLDERS = {"../examples": "examples.md", "../experiments/resbench": "resbench-report.html"}
"""In place of folders of the repository that pages link to."""
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")

sys.path[:0] = [str(DOCS), str(ROOT / "src"), str(ROOT / "experiments")]

import scheme_pages  # noqa: E402

from residua.lab.study.page import page as study_page  # noqa: E402
from residua.lab.study.report import payload  # noqa: E402


def on_config(config):
    """Append the page of every scheme to the section of the navigation that holds the overview."""
    section = next(pages for item in config.nav for title, pages in item.items() if title == "Schemes")
    section.extend({scheme_pages.title(name): f"schemes/{name}.md"} for name in scheme_pages.names())
    return config


def on_files(files, config):
    """Add the generated pages, and every file outside docs/ that a page links to."""
    pages = {"index.md": home(), "examples.md": examples()}
    pages |= {f"schemes/{name}.md": scheme_pages.page(name) for name in scheme_pages.names()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, FOLDERS["../experiments/resbench"], content=report()))
    for target in sorted(outside()):
        files.append(File.generated(config, copied(target), content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links that leave docs/ to the copies."""
    return LINK.sub(lambda match: f"]({inside(match[1])}", markdown)


def home() -> str:
    """Return the README with its links as the site has them."""
    return LINK.sub(lambda match: f"]({inside(match[1])}", readme())


def readme() -> str:
    """Return the README with its links seen from docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return LINK.sub(lambda match: f"]({seen_from_docs(match[1])}", text)


def seen_from_docs(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


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


def report() -> str:
    """Return ResBench's report as `residua study report` writes it."""
    return study_page(payload(scheme_pages.resbench()))


def fenced(text: str) -> str:
    """Put the indented blocks of a docstring between fences."""
    blocks = re.sub(r"(?m)^(?: {4}.*\n?)+", lambda match: f"```text\n{dedented(match[0])}\n```\n", text + "\n")
    return blocks.strip()


def dedented(block: str) -> str:
    return re.sub(r"(?m)^ {4}", "", block).rstrip()


def outside() -> set[str]:
    """Return the files of the repository outside docs/ that its pages link to, from the root."""
    texts = [readme(), *(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))]
    targets = {
        target.removeprefix("../") for text in texts for target in LINK.findall(text) if target.startswith("../")
    }
    return {target for target in targets if (ROOT / target).is_file()}


def copied(target: str) -> str:
    """Return the place of a copy in the site. As text, a browser shows it instead of saving it."""
    return f"repository/{target}.txt"


def inside(target: str) -> str:
    """Return the link to the copy of a file outside docs/, or to the page for a folder; other links stay."""
    if target in FOLDERS:
        return FOLDERS[target]
    file = target.removeprefix("../")
    return copied(file) if target != file and (ROOT / file).is_file() else target
