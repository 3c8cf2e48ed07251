"""Write what ResBench found into the pages: the sections of claims.md, with their numbers and tables.

python resbench/pages.py            exit with status 1 if a page differs from the records
python resbench/pages.py --write    write the pages
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from blocks import pages_of, update
from claims import filled

PAGES = pages_of(Path(__file__).with_name("claims.md"), filled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    return update("resbench/pages.py", PAGES, write=parser.parse_args().write)


if __name__ == "__main__":
    sys.exit(main())
