"""The notebook of a page: its Python blocks as cells that run, the text between them as cells to read.

python docs/notebook.py writes tutorial.ipynb beside tutorial.md.
"""

import json
import re
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook(page: str) -> str:
    """Return a Jupyter notebook, format 4.5, made of a page in Markdown."""
    cells = []
    for number, part in enumerate(BLOCK.split(page)):
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
