"""A real door on loopback, run by a test: the client under test cannot tell the difference."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from torch import Tensor, nn

from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    Request,
    Settings,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.door.eligibility import Requirements
from fedlearn.door.server import DoorSettings
from fedlearn.errors import DeploymentError
from fedlearn.testing.local_door import LocalDoor
from fedlearn.transport.base import ask_once

#: Seconds between two looks at who is connected.
_LOOK_S = 0.02

Model = nn.Module | Mapping[str, Tensor]


class FakeCoordinator(LocalDoor):
    """A coordinator in the test's process: real TLS, real gRPC, no database, no rounds.

    The test says what clients are asked and sees what they answer. Everything lies in a
    temporary folder and is gone when the context is left.

    Args:
        run_id: As for a :class:`~fedlearn.testing.local_door.LocalDoor`; a second fake with the
            same one is the same run to clients.
        requirements: Which clients may be asked.

    Example:
        An application's test, with its own trainer and agent::

            with FakeCoordinator() as coordinator:
                invitation = coordinator.invite("clinic-a")
                agent = Agent(home, trainer="my_app.training:Trainer", invitation=invitation)
                with agent:
                    agent.give_consent()
                    coordinator.wait_for(1)
                    replies = coordinator.train(model, {"epochs": 1, ...})
                assert replies["clinic-a"].num_examples == 120
    """

    def __init__(
        self, *, run_id: str | None = None, requirements: Requirements | None = None
    ) -> None:
        self._temporary = TemporaryDirectory(prefix="fedlearn-fake-")
        eligible = (requirements or Requirements()).admits
        super().__init__(Path(self._temporary.name), run_id=run_id, eligible=eligible)
        self._rounds = count()

    def __enter__(self) -> Self:
        """Open the door on ports that are free."""
        super().__enter__()
        self._channel = self.door.channel()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the door and remove everything."""
        super().__exit__()
        self._temporary.cleanup()

    @property
    def address(self) -> str:
        """Where clients are served, ``host:port``."""
        return self.door.address

    def counters(self) -> Mapping[str, float]:
        """Return what the door has counted so far: sessions, messages, refusals by cause."""
        return self.door.counters.values()

    def invite(self, name: str, *, tags: Sequence[str] = ()) -> Path:
        """Return the file with which ``name`` may join, once; raises as :meth:`invitation`."""
        path = self.folder / f"{name}.invitation"
        self.invitation(name, tags=tags).save(path)
        return path

    def revoke(self, name: str) -> None:
        """Refuse ``name`` from now on, and return when its session has ended.

        Raises:
            DeploymentError: No such client has joined.
        """
        self.registry.revoke(name)
        while name in self.connected():  # the door looks at the registry ever so often
            self.clock.sleep(_LOOK_S)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Be out of reach while the block runs, then come back: same addresses, same run."""
        door = self.doors.pop()
        back = DoorSettings(address=door.address, enrolment_address=door.enrolment_address)
        door.stop(grace_s=0.0)
        try:
            yield
        finally:
            self._channel = self.open(back).channel()

    def connected(self) -> list[str]:
        """Return the names of the clients that may be asked now."""
        names = self._names()
        return [names[client_id] for client_id in self._channel.available()]

    def train(
        self, model: Model, settings: Settings, *, deadline_s: float = 60.0
    ) -> dict[str, TrainReply | Failure]:
        """Ask all clients that are connected to train, and return what they answer in time.

        Args:
            model: The global model.
            settings: How to train, such as
                ``LocalSgd(epochs=1, batch_size=10, learning_rate=0.1).settings()``.
            deadline_s: Seconds to wait.

        Returns:
            By client; a client that is late is absent.

        Raises:
            DeploymentError: No client is connected.
        """
        tensors = _tensors(model)
        request = TrainRequest(
            round_num=next(self._rounds),
            attempt=0,
            tensors=tensors,
            order=tuple(n for n, value in tensors.items() if value.is_floating_point()),
            settings=settings,
            seed=0,
        )
        replies = self._exchange(request, deadline_s)
        return {n: r for n, r in replies.items() if isinstance(r, TrainReply | Failure)}

    def evaluate(
        self, model: Model, *, deadline_s: float = 60.0
    ) -> dict[str, EvaluateReply | Failure]:
        """Ask all clients that are connected to evaluate, as :meth:`train` does."""
        request = EvaluateRequest(round_num=next(self._rounds), tensors=_tensors(model))
        replies = self._exchange(request, deadline_s)
        return {n: r for n, r in replies.items() if isinstance(r, EvaluateReply | Failure)}

    def _exchange(self, request: Request, deadline_s: float) -> dict[str, Reply]:
        cohort = self._channel.available()
        if not cohort:
            raise DeploymentError("no client is connected; call `wait_for` before asking")
        requests = dict.fromkeys(cohort, request)
        arrivals = ask_once(self._channel, requests, deadline_s=deadline_s)
        names = self._names()
        return {names[arrival.client_id]: arrival.reply for arrival in arrivals}

    def _names(self) -> dict[ClientId, str]:
        return {client.client_id: client.name for client in self.registry.clients()}


def _tensors(model: Model) -> Mapping[str, Tensor]:
    return Params.of(model).named() if isinstance(model, nn.Module) else model
