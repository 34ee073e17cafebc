"""The secure-aggregation protocol with all parties in one process.

Every message is encoded, carried by a ``Post`` and decoded, exactly as between machines. A
post that returns None loses the message; that is how clients drop out at any stage.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from fedlearn.core.messages import ClientId
from fedlearn.errors import FedlearnError, ProtocolError
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.server import Confirming, SessionOutcome, open_session
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Contribution, Terms

MessageT = TypeVar("MessageT")


class Way(StrEnum):
    """The direction of a message."""

    DOWN = "down"
    UP = "up"


class Post(Protocol):
    """Carries one message at a time."""

    def __call__(self, stage: Stage, way: Way, client_id: ClientId, data: bytes, /) -> bytes | None:
        """Return the bytes that arrive, or None to lose the message."""


def deliver(_stage: Stage, _way: Way, _client_id: ClientId, data: bytes) -> bytes:
    """Carry every message unchanged."""
    return data


@dataclass(frozen=True, eq=False)
class Cast:
    """A coordinator and the clients enrolled with it.

    Attributes:
        clients: The clients by id.
        signer: The coordinator's identity.
    """

    clients: Mapping[ClientId, SecureClient]
    signer: keys.Signer

    @classmethod
    def of(cls, client_ids: Iterable[ClientId], *, policy: TermsPolicy, num_threads: int) -> "Cast":
        """Create clients with fresh identities, and a directory of all for each."""
        signer, coordinator_key = keys.create_signer()
        identities = {client_id: keys.create_signer() for client_id in client_ids}
        directory = {client_id: public for client_id, (_, public) in identities.items()}
        clients = {
            client_id: SecureClient(
                client_id=client_id,
                signer=identity,
                coordinator_key=coordinator_key,
                directory=directory,
                policy=policy,
                num_threads=num_threads,
            )
            for client_id, (identity, _) in identities.items()
        }
        return cls(clients, signer)


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """The result of a session.

    Attributes:
        outcome: The coordinator's outcome.
        refusals: Reasons why clients stopped, or why the coordinator could not use a reply.
        states: Every client's state afterwards.
    """

    outcome: SessionOutcome
    refusals: Mapping[ClientId, FedlearnError]
    states: Mapping[ClientId, ClientState]


def rehearse(
    terms: Terms,
    *,
    cast: Cast,
    contributions: Mapping[ClientId, Contribution],
    states: Mapping[ClientId, ClientState],
    post: Post,
    num_threads: int,
) -> Rehearsal:
    """Run one session.

    Args:
        terms: Terms of the session.
        cast: The coordinator and the cohort.
        contributions: Each client's summand.
        states: The clients' states before the session.
        post: Carries the messages.
        num_threads: Number of threads on which the coordinator expands masks.

    Raises:
        AggregationAborted: Too few clients completed it.
    """
    cohort = _Cohort(cast.clients, contributions, dict(states), post)
    directory = next(iter(cast.clients.values())).directory
    signed, advertising = open_session(terms, signer=cast.signer, directory=directory)
    every = dict.fromkeys(cast.clients, signed)
    cohort.ask(Stage.ADVERTISE, every, messages.Advert, advertising.receive)
    rosters, sharing = advertising.close()
    cohort.ask(Stage.SHARE, rosters, messages.Shares, sharing.receive)
    packets, masking = sharing.close()
    cohort.ask(Stage.MASK, packets, messages.MaskedVector, masking.receive)
    survivors, after = masking.close()
    final: messages.Message = survivors
    asked: tuple[ClientId, ...] = after.survivors
    if isinstance(after, Confirming):
        told = dict.fromkeys(asked, survivors)
        cohort.ask(Stage.CONFIRM, told, messages.SurvivorSignature, after.receive)
        final, unmasking = after.close()
        asked = after.confirmed
    else:
        unmasking = after
    cohort.ask(Stage.UNMASK, dict.fromkeys(asked, final), messages.ShareRelease, unmasking.receive)
    outcome = unmasking.close(num_threads=num_threads)
    return Rehearsal(outcome, cohort.refusals, cohort.states)


class _Cohort:
    def __init__(
        self,
        clients: Mapping[ClientId, SecureClient],
        contributions: Mapping[ClientId, Contribution],
        states: dict[ClientId, ClientState],
        post: Post,
    ) -> None:
        self._clients, self._contributions, self._post = clients, contributions, post
        self.states = states
        self.refusals: dict[ClientId, FedlearnError] = {}

    def ask(
        self,
        stage: Stage,
        down: Mapping[ClientId, messages.Message],
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
    ) -> None:
        """Send each client its message, and pass the replies to ``receive``."""
        for client_id, message in down.items():
            try:
                reply = self._exchange(stage, client_id, messages.encode(message))
                if reply is None:
                    continue
                answer = messages.decode(reply)
                if not isinstance(answer, kind):
                    raise ProtocolError(f"{type(answer).__name__}, not {kind.__name__}")
                receive(client_id, answer)
            except FedlearnError as error:
                self.refusals[client_id] = error

    def _exchange(self, stage: Stage, client_id: ClientId, data: bytes) -> bytes | None:
        arrived = self._post(stage, Way.DOWN, client_id, data)
        if arrived is None:
            return None
        try:
            reply, self.states[client_id] = self._clients[client_id].handle(
                messages.decode(arrived),
                self.states[client_id],
                contribute=lambda _: self._contributions[client_id],
            )
        except FedlearnError:
            self.states[client_id] = self.states[client_id].with_step(None)
            raise
        return self._post(stage, Way.UP, client_id, messages.encode(reply))
