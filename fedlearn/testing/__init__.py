"""For the tests of applications that embed the client: a coordinator of their own."""

from fedlearn.testing.fake_coordinator import FakeCoordinator

__all__ = ["FakeCoordinator"]
