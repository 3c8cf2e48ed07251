"""Our results of each scheme, which `residua schemes NAME` shows: src/residua/commands/results.csv.

python resbench/scheme_results.py     write the file again from resbench/records/main
"""

import csv
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "src" / "residua" / "commands" / "results.csv"


def results() -> str:
    """The rows of ResBench as the pages of the schemes have them, with a star behind what is bold there."""
    sys.path.insert(0, str(ROOT / "docs"))
    import scheme_pages

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    baselines = scheme_pages.resbench().study.baselines
    table.writerow(["scheme", "row", "size", "loss", *(f"to {name}" for name in baselines), "time"])
    for name in scheme_pages.names():
        for size, label, *cells in scheme_pages.compared_rows(name):
            starred = [f"{cell.strip('*')}*" if cell.startswith("**") else cell for cell in cells]
            table.writerow([name, label, size, *starred])
    return text.getvalue()


if __name__ == "__main__":
    FILE.write_text(results(), encoding="utf-8")
