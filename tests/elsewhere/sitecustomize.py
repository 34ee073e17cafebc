"""Shows fedlearn the standard library of macOS or Windows, on Linux, in each process of a test.

With this folder on ``PYTHONPATH`` and ``FEDLEARN_TEST_PLATFORM`` set to ``darwin`` or ``win32``,
modules of fedlearn import what the other system has: the rest raises AttributeError or ImportError.
The standard library itself and other packages see Linux. What the other system lacks is read from
typeshed's branches on ``sys.platform``; what it has and Linux lacks is in :mod:`doubles`.
"""

import os

if platform := os.environ.get("FEDLEARN_TEST_PLATFORM"):
    from importer import install

    install(platform)
