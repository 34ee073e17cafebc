"""Test applications that embed the client, against a real coordinator server on loopback.

The server runs inside the test process. gRPC must be configured to survive forks of that process,
so the environment is prepared before gRPC is imported.
"""

import os

from fedlearn.transport.grpc_environment import prepare_for_grpc

prepare_for_grpc(os.environ, verbosity=None)

from fedlearn.testing.fake_coordinator import FakeCoordinator, SecureSum  # noqa: E402 - see above
from fedlearn.testing.local_gateway import LocalGateway  # noqa: E402 - see above

__all__ = ["FakeCoordinator", "LocalGateway", "SecureSum"]
