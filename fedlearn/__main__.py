"""``python -m fedlearn``: the command line."""

import sys

from fedlearn.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
