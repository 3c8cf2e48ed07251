"""The entry point: `residua` and `python -m residua`."""

import gc
import os
import sys

# PyTorch reads GOMP_SPINCOUNT when it is loaded. Threads that spin for long while they wait become several times slower
# when other programs use the cores. Threads that sleep at once are slower on idle cores: experiments/threads.jsonl.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> int:
    """Run one command; return its exit status."""
    try:
        from residua.commands.cli import main
    except KeyboardInterrupt:  # where the disk is slow, imports take seconds
        print("residua: interrupted", file=sys.stderr)
        return 130
    status = main()
    gc.freeze()  # otherwise Python searches all objects of PyTorch for cycles before it ends, for over a second
    return status


if __name__ == "__main__":
    sys.exit(main())
