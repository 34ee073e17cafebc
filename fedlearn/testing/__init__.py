"""For the tests of applications that embed the client: a coordinator of their own.

It serves in the tests' own process. What they fork must live beside it, so the environment is
prepared before the first use of the name imports gRPC.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from fedlearn.transport.grpc_environment import prepare_for_grpc

if TYPE_CHECKING:
    from fedlearn.testing.fake_coordinator import FakeCoordinator

__all__ = ["FakeCoordinator"]


def __getattr__(name: str) -> Any:  # Any: the type of a name is declared above
    if name in __all__:
        prepare_for_grpc(os.environ, verbosity=None)
        return getattr(importlib.import_module("fedlearn.testing.fake_coordinator"), name)
    raise AttributeError(f"module 'fedlearn.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
