"""The entry point: `residua` and `python -m residua`."""

import os
import sys

from residua.commands.cli import main

# Read when PyTorch is loaded. Threads that spin while they wait for each other take many times as long as soon as other
# programs use the cores: experiments/threads.jsonl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":
    sys.exit(main())
