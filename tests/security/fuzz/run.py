"""Fuzz one target: ``python -m tests.security.fuzz.run TARGET FOLDER... [-max_total_time=60]``.

Folders and options are libFuzzer's; what was found lies in the working directory as
``crash-…``: once mended, it belongs into the target's corpus.
"""

import logging
import sys

import atheris
import structlog
from atheris.import_hook import instrument_imports

with instrument_imports(include=["fedlearn", "tests.security.fuzz.targets"]):
    from tests.security.fuzz.targets import TARGETS, planted


def main() -> None:
    """Run until the time is over or something is found."""
    name = sys.argv.pop(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    atheris.Setup(sys.argv, {**TARGETS, "planted": planted}[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
