"""The entry point: `residua` and `python -m residua`."""

import sys


def main() -> int:
    """Run the command line. It is imported here, so that Ctrl-C while Python imports it ends in one line too."""
    try:
        from residua.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        print("residua: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
