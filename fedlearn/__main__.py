"""Runs the command line as ``python -m fedlearn``."""

import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command line and return the exit code.

    Importing it takes a while, and Ctrl-C meanwhile must not print a traceback either.
    """
    try:
        from fedlearn.cli.app import main as command_line  # noqa: PLC0415 (inside the try)
    except KeyboardInterrupt:
        print("fedlearn: interrupted", file=sys.stderr)  # noqa: T201 (the terminal)
        return _INTERRUPTED
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
