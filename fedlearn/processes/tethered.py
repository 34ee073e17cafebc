"""Run a module as a program that exits when the process that holds its stdin pipe dies.

    python -m fedlearn.processes.tethered MODULE [ARGUMENT ...]

The watch starts before the module is imported, since importing torch takes seconds.
"""

import runpy
import sys
import threading

from fedlearn.processes.forks import exit_with_parent


def main() -> None:
    """Run the module named by the first argument, with the remaining arguments."""
    # Read descriptor 0, not sys.stdin: the interpreter aborts at shutdown if a daemon thread holds
    # the lock of sys.stdin's buffer.
    watch = threading.Thread(
        target=exit_with_parent, args=(0,), name="fedlearn-lifeline", daemon=True
    )
    watch.start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
