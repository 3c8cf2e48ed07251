"""The entry point: `residua` and `python -m residua`."""

import os
import sys

# Read when PyTorch is loaded. Threads that spin long while they wait for each other take several times as long as soon
# as other programs use the cores; those that sleep at once are slower on idle ones: experiments/threads.jsonl.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> int:
    """Run one command; return its exit status."""
    try:
        from residua.commands.cli import main
    except KeyboardInterrupt:  # where the disk is slow, imports take seconds
        print("residua: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(main())
