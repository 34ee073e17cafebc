"""``python -m fedlearn``: the command line."""

import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command line and return the exit code.

    Importing it takes a while; who interrupts that sees no traceback either.
    """
    try:
        from fedlearn.cli.app import main as command_line  # noqa: PLC0415 (see above)
    except KeyboardInterrupt:
        print("fedlearn: interrupted", file=sys.stderr)  # noqa: T201 (the terminal)
        return _INTERRUPTED
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
