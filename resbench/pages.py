"""Write what ResBench found into the pages: its tables, and the sentences of claims.md with their numbers.

python resbench/pages.py            exit with status 1 if a page differs from the records
python resbench/pages.py --write    write the pages
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from blocks import Blocks, update
from claims import claims, templates
from tables import (
    copying_table,
    decisions_table,
    field_table,
    fresh_table,
    rates_table,
    resbench_table,
    search_table,
    split_table,
)

PAGES: dict[str, Blocks] = {
    "docs/field.md": {"ours": field_table},
    "docs/resbench.md": {"resbench": resbench_table},
    "resbench/evidence.md": {
        "copying": copying_table,
        "remaining": partial(split_table, "0.3M"),
        "million": partial(split_table, "1M"),
        "rates": rates_table,
        "search": search_table,
        "decisions": decisions_table,
        "ten": partial(split_table, "10M"),
        "fresh": fresh_table,
    },
}
for page, name in templates():
    PAGES[page] = {**PAGES.get(page, {}), name: partial(claims, page, name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    return update("resbench/pages.py", PAGES, write=parser.parse_args().write)


if __name__ == "__main__":
    sys.exit(main())
