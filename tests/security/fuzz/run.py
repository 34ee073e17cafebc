"""Run fuzz targets, each for some seconds: ``python -m tests.security.fuzz.run TARGET=SECONDS...``.

A finding is saved in the working directory as ``TARGET/crash-…``, next to the fuzzer's ``log`` and
its exit ``code``, which is 0 if there is none. Once it is fixed, add it to the target's corpus.
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

#: Packages that read untrusted bytes. Only these are instrumented: ten modules take a second.
_READERS = ("core", "gateway", "identity", "store", "testing", "transport")
_ROOT = Path(__file__).parents[3]


def _others() -> Iterator[str]:
    """Yield the product's modules outside of these packages."""
    for path in (_ROOT / "fedlearn").glob("*/**/*.py"):
        package, *parts = path.relative_to(_ROOT / "fedlearn").with_suffix("").parts
        if package not in _READERS:
            yield ".".join(("fedlearn", package, *(each for each in parts if each != "__init__")))


with instrument_imports(include=["fedlearn", "tests"], exclude=list(_others())):
    from tests.security.fuzz.targets import TARGETS, planted

_CORPUS = Path(__file__).parent / "corpus"


def fuzz(name: str, seconds: str) -> None:
    """Fuzz one target until the time is over or there is a finding."""
    folder = Path(name)
    (folder / "found").mkdir(parents=True)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    options = ["-max_len=4096", "-timeout=10", "-rss_limit_mb=4096"]
    options += [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/"]
    corpus = [str(path) for path in (folder / "found", _CORPUS / name) if path.is_dir()]
    target = {**TARGETS, "planted": planted}[name]
    # When the interpreter exits, it drops its handler of the fuzzer's alarm before the finding is
    # written. An alarm after that would kill the process, so cancel it.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.0)
    atheris.Setup([sys.argv[0], *options, *corpus], target)
    atheris.Fuzz()


def main() -> None:
    """Fuzz one target after the other, each in a fork, so that modules are imported only once."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for each in sys.argv[1:]:
        name, _, seconds = each.partition("=")
        if (child := os.fork()) == 0:
            fuzz(name, seconds)
        _, status = os.waitpid(child, 0)
        Path(name, "code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
