"""The notebook of a page: an installation, its Python blocks as cells that run, the text between them to read.

python docs/notebook.py writes tutorial.ipynb beside tutorial.md.
"""

import json
import re
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)

INSTALL = """\
# Installs residua if it is missing: a wheel beside this notebook, else the repository of its OWNER.
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("residua") is None:
    wheels = [str(path) for path in sorted(Path().glob("residua-*.whl"))]
    source = wheels[-1] if wheels else "residua @ git+https://github.com/OWNER/residua"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source, "numpy"], check=True)
"""


def notebook(page: str) -> str:
    """Return a Jupyter notebook, format 4.5, made of a page in Markdown."""
    cells = []
    heading, rest = page.split("\n\n", 1)
    for number, part in enumerate([heading, INSTALL, *BLOCK.split(rest)]):
        kind = "code" if number % 2 else "markdown"
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": part.strip("\n")}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        if cell["source"]:
            cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    page = Path(__file__).with_name("tutorial.md")
    page.with_suffix(".ipynb").write_text(notebook(page.read_text(encoding="utf-8")), encoding="utf-8")
