"""Lies over a real server: some lies of each message, over gRPC with mutual TLS.

No client may drop out of these sessions, so any refusal ends them with nothing released.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from fedlearn.client.policy import Policy, SecureAggregationPolicy
from fedlearn.core.messages import ClientId, Failure, SecureRequest, SecureStageRequest
from fedlearn.identity.registry import EnrolledClient
from fedlearn.secagg import keys, messages
from fedlearn.secagg.session import Stage
from fedlearn.transport.wire_pb2 import Eligibility
from tests.rosters import survivors_of
from tests.security.liars.gateway import (
    LONG_S,
    NUM_CLIENTS,
    LyingGateway,
    ThreadedClient,
)
from tests.security.liars.harness import (
    Fixed,
    Lie,
    Stand,
    Told,
    answer_of,
    require_nothing,
    row_of,
)
from tests.security.liars.lies import LIES

pytestmark = pytest.mark.xdist_group("liars")

VICTIM, OTHER = ClientId(1), ClientId(3)
EVERYONE = list(range(NUM_CLIENTS))
EVERYBODY = [ClientId(each) for each in EVERYONE]
SELECTED = {
    "terms without a signature",
    "terms of another run",
    "a weaker adversary",
    "an invented neighbor",
    "adverts of an earlier session",
    "packets exchanged",
    "another model",
    "it alone survives",
    "a forged signature",
    "signatures of an earlier session",
    f"garbage, for the stage `{Stage.MASK}`",
    "the message of `unmask` at `confirm`",
}


@dataclass
class Deployed:
    """Five clients connected to a server, and the number of the next round."""

    site: LyingGateway
    clients: list[ThreadedClient]
    stand: Stand
    rounds: Iterator[int]

    def honest(self) -> None:
        """Run a session without a lie, as a control."""
        self.stand.liar.lie, self.stand.liar.num_told = None, 0
        collected = self.stand.collect(round_num=next(self.rounds))
        assert self.stand.require_exact(collected) == EVERYONE


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with ExitStack() as stack:
        site = stack.enter_context(LyingGateway(tmp_path_factory.mktemp("gateway")))
        clients = []
        for number in EVERYONE:
            clients.append(ThreadedClient(site.home(number), site.invite(number)))
            stack.callback(clients[-1].stop)
        site.wait_for(NUM_CLIENTS)
        yield Deployed(site, clients, site.stand(victim=VICTIM), count())


def other_key(told: Told) -> SecureRequest:
    """Send another identity key of a neighbor than the pinned one."""
    assert isinstance(told.request, SecureStageRequest)
    directory = {**told.request.directory, OTHER: keys.create_signer()[1]}
    return replace(told.request, directory=directory)


AT_THE_DOOR = [
    *(lie for lie in LIES if lie.name in SELECTED),
    Lie("another identity of a neighbor", Stage.SHARE, other_key, ""),
]


def test_the_selection_holds_lies_of_every_stage() -> None:
    """Each selected name is that of a lie."""
    assert len(AT_THE_DOOR) == len(SELECTED) + 1
    assert {lie.stage for lie in AT_THE_DOOR} == set(Stage)


@pytest.mark.slow  # the same lies are told over memory as well
@pytest.mark.parametrize("lie", AT_THE_DOOR, ids=lambda lie: lie.name)
def test_a_lie_over_grpc_ends_the_session_and_nothing_is_released(
    deployed: Deployed, lie: Lie
) -> None:
    """An honest session comes first: it is the control, and gives messages to replay."""
    deployed.honest()
    liar = deployed.stand.liar
    liar.lie = lie
    collected = deployed.stand.collect(round_num=next(deployed.rounds))
    assert liar.num_told == 1
    refusal = liar.replies[VICTIM, lie.stage]
    assert isinstance(refusal, Failure), f"it answered with {answer_of(refusal)}"
    assert lie.reason in refusal.reason
    assert lie.reason in row_of(collected, VICTIM).reason
    require_nothing(collected)
    if lie.stage is not Stage.ADVERTISE:
        assert isinstance(liar.ask(VICTIM, liar.requests[lie.stage], deadline_s=LONG_S), Failure)


@pytest.mark.slow
def test_what_was_released_is_not_released_again_by_a_client_that_was_started_again(
    deployed: Deployed,
) -> None:
    """The client remembers on disk: it answers neither other survivors nor another session.

    The same question gets the same shares, which reveal nothing new.
    """
    deployed.honest()
    liar = deployed.stand.liar
    released = answer_of(liar.replies[VICTIM, Stage.UNMASK])
    assert isinstance(released, messages.ShareRelease)
    deployed.clients[VICTIM].stop()
    deployed.clients[VICTIM].start()
    deployed.site.wait_for(NUM_CLIENTS)
    dropped = survivors_of([i for i in EVERYBODY if i != OTHER], EVERYBODY)
    others = replace(liar.requests[Stage.CONFIRM], message=messages.encode(dropped))
    for request in (
        others,
        liar.requests[Stage.CONFIRM],
        liar.requests[Stage.ADVERTISE],
    ):
        assert isinstance(liar.ask(VICTIM, request, deadline_s=LONG_S), Failure)
    again = answer_of(liar.ask(VICTIM, liar.requests[Stage.UNMASK], deadline_s=LONG_S))
    assert isinstance(again, messages.ShareRelease)
    assert messages.encode(again) == messages.encode(released)
    deployed.honest()


class Counting(Fixed):
    """A trainer that knows how much data it has."""

    num_examples = 120


def test_a_client_that_requires_secure_aggregation_does_not_tell_its_examples(
    tmp_path: Path,
) -> None:
    """Not even when it connects. Control: a client that does not require it reports the number."""
    told: dict[str, int] = {}

    def note(client: EnrolledClient, says: Eligibility) -> bool:
        told[client.name] = says.num_examples
        return True

    strict = Policy(secure_aggregation=SecureAggregationPolicy(required=True))
    with LyingGateway(tmp_path, eligible=note) as site, ExitStack() as stack:
        for number, policy in enumerate((Policy(), strict)):
            home, invitation = site.home(number), site.invite(number)
            client = ThreadedClient(home, invitation, trainer=Counting(), policy=policy)
            stack.callback(client.stop)
        assert len(site.gateway.channel().available()) == 2
    assert told == {"client-0": 120, "client-1": 0}
