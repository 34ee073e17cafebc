"""Show fedlearn the standard library of macOS or Windows, on Linux, in each test process.

With this folder on ``PYTHONPATH`` and ``FEDLEARN_TEST_PLATFORM`` set to ``darwin`` or ``win32``,
fedlearn's modules see what the other system has: other names raise AttributeError or ImportError.
The standard library itself and other packages see Linux. Missing names come from
typeshed's branches on ``sys.platform``; what Linux lacks is in :mod:`doubles`.
"""

import os

if platform := os.environ.get("FEDLEARN_TEST_PLATFORM"):
    from importer import install

    install(platform)
