"""`python -m residua` is the command `residua`."""

import sys

from residua.cli import main

if __name__ == "__main__":
    sys.exit(main())
