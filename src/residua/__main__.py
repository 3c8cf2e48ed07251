"""The entry point: `residua` and `python -m residua`."""

import sys

from residua.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
