"""For the tests of applications that embed the client: a coordinator of their own, and its door.

They serve in the tests' own process. What it forks must live beside them, so the environment is
prepared before gRPC is imported.
"""

import os

from fedlearn.transport.grpc_environment import prepare_for_grpc

prepare_for_grpc(os.environ, verbosity=None)

from fedlearn.testing.fake_coordinator import FakeCoordinator, SecureSum  # noqa: E402 - see above
from fedlearn.testing.local_door import LocalDoor  # noqa: E402 - see above

__all__ = ["FakeCoordinator", "LocalDoor", "SecureSum"]
