"""Fuzz targets, each for some seconds: ``python -m tests.security.fuzz.run TARGET=SECONDS...``.

What is found lies in the working directory as ``TARGET/crash-…``, next to the fuzzer's ``log`` and
its ``code``, which is 0 where nothing is found. Once fixed, it belongs in the target's corpus.
"""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import atheris
import structlog
from atheris.import_hook import instrument_imports

#: What reads bytes of others. The fuzzer looks into nothing else: it rewrites ten modules a second.
_READERS = ("core", "door", "identity", "store", "testing", "transport")
_ROOT = Path(__file__).parents[3]


def _others() -> Iterator[str]:
    """Yield the modules of the product that are no readers."""
    for path in (_ROOT / "fedlearn").glob("*/**/*.py"):
        package, *parts = path.relative_to(_ROOT / "fedlearn").with_suffix("").parts
        if package not in _READERS:
            yield ".".join(("fedlearn", package, *(each for each in parts if each != "__init__")))


with instrument_imports(include=["fedlearn", "tests"], exclude=list(_others())):
    from tests.security.fuzz.targets import TARGETS, planted

_CORPUS = Path(__file__).parent / "corpus"


def fuzz(name: str, seconds: str) -> None:
    """Fuzz one target until the time is over or something is found."""
    folder = Path(name)
    (folder / "found").mkdir(parents=True)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    options = ["-max_len=4096", "-timeout=10", "-rss_limit_mb=4096"]
    options += [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/"]
    corpus = [str(path) for path in (folder / "found", _CORPUS / name) if path.is_dir()]
    target = {**TARGETS, "planted": planted}[name]
    # The interpreter drops the handler of the fuzzer's alarm as it ends, before what is found is
    # written; an alarm then would kill it.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.0)
    atheris.Setup([sys.argv[0], *options, *corpus], target)
    atheris.Fuzz()


def main() -> None:
    """Fuzz one target after the other, each in a fork: the imports are paid once."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for each in sys.argv[1:]:
        name, _, seconds = each.partition("=")
        if (child := os.fork()) == 0:
            fuzz(name, seconds)
        _, status = os.waitpid(child, 0)
        Path(name, "code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
