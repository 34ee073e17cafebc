"""Run a module as a program that ends with the process at the other end of its input.

    python -m fedlearn.processes.tethered MODULE [ARGUMENT ...]

The watch begins before the module is imported: with torch that takes seconds.
"""

import runpy
import sys
import threading

from fedlearn.processes.forks import exit_with_parent


def main() -> None:
    """Run the module that the first argument names; the others are its own."""
    # Not sys.stdin: a thread inside of its buffer would abort the interpreter at its end.
    watch = threading.Thread(
        target=exit_with_parent, args=(0,), name="fedlearn-lifeline", daemon=True
    )
    watch.start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
