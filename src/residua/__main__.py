"""The entry point: `residua` and `python -m residua`."""

import os
import sys

from residua.commands.cli import main

# Read when PyTorch is loaded. Threads that spin long while they wait for each other take several times as long as soon
# as other programs use the cores; those that sleep at once are slower on idle ones: experiments/threads.jsonl.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if __name__ == "__main__":
    sys.exit(main())
