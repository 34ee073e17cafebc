"""A real door on loopback, run by a test: the client under test cannot tell the difference."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from torch import Tensor, nn

from fedlearn.core.clock import SystemClock, utc
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
from fedlearn.core.randomness import SecretBytes
from fedlearn.door.authority import Authority
from fedlearn.door.eligibility import Requirements
from fedlearn.door.server import Door, DoorSettings
from fedlearn.errors import DeploymentError
from fedlearn.identity.registry import MemoryRegistry
from fedlearn.transport.identity import Invitation

_VALID_S = 3600.0
_ANYWHERE = "127.0.0.1:0"
_RUN_ID_BYTES = 16

Model = nn.Module | Mapping[str, Tensor]


class FakeCoordinator:
    """A coordinator in the test's process: real TLS, real gRPC, no database, no rounds.

    The test says what clients are asked and sees what they answer. Everything lies in a
    temporary folder and is gone when the context is left.

    Args:
        run_id: Names the run to clients; ``None`` draws one. A second fake with the same one
            is the same run to them.
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
        self._run_id = run_id or SecretBytes.generate(_RUN_ID_BYTES).reveal().hex()
        self._requirements = requirements or Requirements()
        self._clock = SystemClock()
        self._registry = MemoryRegistry(self._clock)
        self._round_num = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Open the door on ports that are free."""
        self._folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="fedlearn-fake-")))
        self._authority = Authority.open(self._folder / "authority", host_names=())
        self._door = Door(
            DoorSettings(address=_ANYWHERE, enrolment_address=_ANYWHERE),
            registry=self._registry,
            run_id=self._run_id,
            spool_dir=self._folder / "spool",
            authority=self._authority,
            eligible=self._requirements.admits,
            is_leader=lambda: True,
            clock=self._clock,
        )
        self._door.start()
        self._stack.callback(self._door.stop, grace_s=0.0)
        self._channel = self._door.channel()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the door and remove everything."""
        self._stack.close()

    @property
    def address(self) -> str:
        """Where clients are served, ``host:port``."""
        return self._door.address

    def counters(self) -> Mapping[str, float]:
        """Return what the door has counted so far: sessions, messages, refusals by cause."""
        return self._door.counters.values()

    def invite(self, name: str, *, tags: Sequence[str] = ()) -> Path:
        """Return the file with which ``name`` may join, once.

        Raises:
            DeploymentError: ``name`` cannot name a client.
        """
        invitation = Invitation(
            name=name,
            addresses=(self._door.address,),
            enrolment_addresses=(self._door.enrolment_address,),
            ca_pem=self._authority.ca_pem,
            token=self._registry.invite(name, tags=tags, valid_s=_VALID_S),
            expires_utc=utc(self._clock.unix_s() + _VALID_S),
        )
        path = self._folder / f"{name}.invitation"
        invitation.save(path)
        return path

    def revoke(self, name: str) -> None:
        """Refuse ``name`` from now on.

        Raises:
            DeploymentError: There is no such client.
        """
        self._registry.revoke(name)

    def connected(self) -> list[str]:
        """Return the names of the clients that may be asked now."""
        names = self._names()
        return [names[client_id] for client_id in self._channel.available()]

    def wait_for(self, num: int, *, timeout_s: float = 30.0) -> None:
        """Return when ``num`` clients may be asked.

        Raises:
            DeploymentError: They did not come in time.
        """
        ends_s = self._clock.now_s() + timeout_s

        def check() -> None:
            if self._clock.now_s() > ends_s:
                raise DeploymentError(
                    f"{len(self._channel.available())} of {num} clients came within "
                    f"{timeout_s:g} s; look into their logs, or raise timeout_s"
                )

        self._channel.wait_for(num, check)

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
        request = TrainRequest(
            round_num=self._next_round(),
            attempt=0,
            tensors=_tensors(model),
            settings=settings,
            seed=0,
        )
        replies = self._exchange(request, deadline_s)
        return {n: r for n, r in replies.items() if isinstance(r, TrainReply | Failure)}

    def evaluate(
        self, model: Model, *, deadline_s: float = 60.0
    ) -> dict[str, EvaluateReply | Failure]:
        """Ask all clients that are connected to evaluate, as :meth:`train` does.

        Raises:
            DeploymentError: No client is connected.
        """
        request = EvaluateRequest(round_num=self._next_round(), tensors=_tensors(model))
        replies = self._exchange(request, deadline_s)
        return {n: r for n, r in replies.items() if isinstance(r, EvaluateReply | Failure)}

    def _exchange(self, request: Request, deadline_s: float) -> dict[str, Reply]:
        cohort = self._channel.available()
        if not cohort:
            raise DeploymentError("no client is connected; call `wait_for` before asking")
        arrivals = self._channel.exchange(dict.fromkeys(cohort, request), deadline_s=deadline_s)
        names = self._names()
        return {names[arrival.client_id]: arrival.reply for arrival in arrivals}

    def _names(self) -> dict[ClientId, str]:
        return {client.client_id: client.name for client in self._registry.clients()}

    def _next_round(self) -> int:
        self._round_num += 1
        return self._round_num - 1


def _tensors(model: Model) -> Mapping[str, Tensor]:
    return Params.of(model).named() if isinstance(model, nn.Module) else model
