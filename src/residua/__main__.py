"""`python -m residua` is the command `residua`."""

import sys

from residua.cli import main

sys.exit(main())
