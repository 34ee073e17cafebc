"""How much a lying coordinator gets out of one client whose policy limits it.

The client answers as often as its policy allows. Then the liar tries every way to get one more
answer; each is a row of the table on the documentation page about the client's floor.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedlearn.algorithms.collector import RoundRequest
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.transforms import NoisedUpdates
from fedlearn.client.policy import Policy, PrivacyMode, PrivacyPolicy
from fedlearn.core.messages import (
    EvaluateReply,
    EvaluateRequest,
    Reply,
    SecureEvaluateRequest,
    SecureTrainRequest,
    TrainReply,
    TrainRequest,
)
from fedlearn.secagg.fixed_point import Lane, LaneRole
from fedlearn.secagg.plan import PARAMETERS as DELTA_LANE
from fedlearn.secagg.plan import build_notice, hash_notice
from fedlearn.secagg.terms import Terms, propose
from tests.security.liars.gateway import LyingGateway, ThreadedClient
from tests.security.liars.harness import PARAMS
from tests.security.liars.lone_victim import PARAMETERS, Begun, LoneVictim, Refused

pytestmark = pytest.mark.xdist_group("liars")

LOCAL = LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)
#: A client's noise, relative to the largest norm of its contribution.
SHARE = 8.0
LEVELS = 1 << 20
TARGET_DELTA = 1e-6


def epsilon(distance: float) -> float:
    """Return ε of a Gaussian of standard deviation 1 whose mean moves by ``distance``."""

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2.0))

    def delta(value: float) -> float:
        low = normal(-distance / 2 - value / distance)
        return normal(distance / 2 - value / distance) - math.exp(value) * low

    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > TARGET_DELTA else (low, middle)
    return high


def budget_for_two(distance: float) -> Policy:
    """Return the policy of a client whose daily budget allows two releases, but not three."""
    two, three = (epsilon(math.sqrt(number) * distance) for number in (2, 3))
    mode: PrivacyMode = "distributed" if distance == IN_A_SUM else "local"
    return Policy(privacy=PrivacyPolicy(mode=mode, max_epsilon_per_day=(two + three) / 2))


#: How far one client moves a release. In a sum of four, the noise of three clients counts.
IN_A_SUM, ALONE = 2.0 / (SHARE * math.sqrt(3)), 2.0 / SHARE


def training(round_num: int, *, noise: NoisedUpdates | None = None) -> TrainRequest:
    request = RoundRequest(
        round_num=round_num,
        attempt=0,
        params=PARAMS,
        strategy=FedAvg(LOCAL),
        broadcast={},
        seed=0,
    ).message()
    return replace(request, settings=settings_of(LOCAL, [noise])) if noise else request


def evaluation(round_num: int) -> EvaluateRequest:
    return EvaluateRequest(round_num=round_num, tensors=PARAMS.to_tensors())


def lane(name: str, *, role: LaneRole, size: int, noise: float) -> Lane:
    return Lane(
        name=name,
        role=role,
        size=size,
        step=1.0 / LEVELS,
        max_level=LEVELS,
        modulus_bits=40,
        weighted=False,
        noise=noise,
    )


def update_lane(*, noise: float) -> Lane:
    size = PARAMS.layout.size
    sigma = noise * (LEVELS + math.sqrt(size))
    return lane(DELTA_LANE, role=LaneRole.VECTOR, size=size, noise=sigma)


def measure_lane(*, noise: float) -> Lane:
    sigma = noise * math.sqrt(5) * LEVELS
    return lane("loss", role=LaneRole.METRIC, size=2, noise=sigma)


@dataclass(frozen=True)
class Ask:
    """A request of the liar for one release of the client.

    Attributes:
        policy: Policy of a client that answers twice a day.
        rule: The rule by which it refuses the third time.
        request: Returns the client's task for a round.
        lanes: Lanes of the sum; empty: the reply is sent in the clear.
    """

    policy: Policy
    rule: str
    request: Callable[[int], TrainRequest | EvaluateRequest]
    lanes: tuple[Lane, ...] = ()

    @property
    def is_summed(self) -> bool:
        return bool(self.lanes)

    def terms(self, round_num: int, *, run: str, attempt: int) -> Terms:
        return propose(
            PARAMETERS,
            run_id=run.encode().ljust(16)[:16],
            round_num=round_num,
            attempt=attempt,
            request_hash=hash_notice(build_notice(self.request(round_num))),
            max_weight=0,
            lanes=self.lanes,
        )


def noisy_training(round_num: int) -> TrainRequest:
    return training(round_num, noise=NoisedUpdates(clip_norm=1.0, noise_multiplier=SHARE))


ASKS: Mapping[str, Ask] = {
    "noisy sums": Ask(
        budget_for_two(IN_A_SUM),
        "privacy.max_epsilon_per_day",
        training,
        (update_lane(noise=SHARE),),
    ),
    "noisy updates": Ask(budget_for_two(ALONE), "privacy.max_epsilon_per_day", noisy_training),
    "trainings in a sum": Ask(
        Policy(max_tasks_per_day=2), "max_tasks_per_day", training, (update_lane(noise=0.0),)
    ),
    "trainings": Ask(Policy(max_tasks_per_day=2), "max_tasks_per_day", training),
    "evaluations in a sum": Ask(
        Policy(max_evaluations_per_day=2),
        "max_evaluations_per_day",
        evaluation,
        (measure_lane(noise=0.0),),
    ),
    "evaluations": Ask(Policy(max_evaluations_per_day=2), "max_evaluations_per_day", evaluation),
}


@dataclass
class Stage:
    """A victim that has answered as often as it may, and its liar.

    Attributes:
        ask: The liar's request.
        held: A session that the victim began before that, under the name of another run.
    """

    liar: LoneVictim
    client: ThreadedClient
    ask: Ask
    held: Begun | None = None

    def release(self, round_num: int = 0, *, run: str = "lies", attempt: int = 0) -> None:
        """Have the victim answer once; raise :class:`Refused` if it does not."""
        if self.ask.is_summed:
            self.open(self.begin(round_num, run=run, attempt=attempt), round_num)
        else:
            reply: Reply = self.liar.reply(self.ask.request(round_num))
            assert isinstance(reply, TrainReply | EvaluateReply)

    def begin(self, round_num: int = 0, *, run: str = "lies", attempt: int = 0) -> Begun:
        terms = self.ask.terms(round_num, run=run, attempt=attempt)
        return self.liar.begin(terms, build_notice(self.ask.request(round_num)))

    def open(self, begun: Begun, round_num: int = 0) -> None:
        request = self.ask.request(round_num)

        def work(packets: bytes) -> SecureTrainRequest | SecureEvaluateRequest:
            if isinstance(request, TrainRequest):
                return SecureTrainRequest(message=packets, train=request)
            return SecureEvaluateRequest(message=packets, evaluate=request)

        total = self.liar.open(begun, work)
        assert total.sums, "the sum is open"


@contextmanager
def victim(folder: Path, ask: Ask) -> Iterator[Stage]:
    with ExitStack() as stack:
        site = stack.enter_context(LyingGateway(folder))
        client = ThreadedClient(site.home(0), site.invite(0), policy=ask.policy)
        stack.callback(client.stop)
        site.wait_for(1)
        (number,) = site.gateway.channel().available()
        yield Stage(LoneVictim(site, number), client, ask)


def repeat(stage: Stage) -> None:
    """Send the same signed terms with other clients, or the same task."""
    stage.release()


def renumber_rounds(stage: Stage) -> None:
    stage.release(7)


def renumber_attempts(stage: Stage) -> None:
    stage.release(attempt=3)


def rename_run(stage: Stage) -> None:
    """Rename the run in the tasks and in the terms, within one connection."""
    stage.liar.name_run("another")
    try:
        stage.release(run="another")
    finally:
        stage.liar.name_run("lies")


def reorder(stage: Stage) -> None:
    """Ask for the vector of a session that the client accepted while its budget had room for it."""
    if stage.held is None:
        stage.release()
    else:
        stage.open(stage.held)


def reconnect(stage: Stage) -> None:
    """Close the connection and serve another run."""
    stage.liar.reconnect("another-run")
    stage.release(run="another-run")


def restart(stage: Stage) -> None:
    stage.client.stop()
    stage.client.start()
    stage.release(8)


#: Connecting to another run comes last, because the client then forgets the sessions of this one.
WAYS = [reorder, repeat, renumber_rounds, renumber_attempts, rename_run, restart, reconnect]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name.startswith("noisy") else pytest.param(name, marks=pytest.mark.slow)
        for name in ASKS
    ],
)
def test_no_way_to_ask_gets_more_than_the_policy_allows(tmp_path: Path, name: str) -> None:
    """Control: the client answers twice."""
    with victim(tmp_path, ASKS[name]) as stage:
        if stage.ask.is_summed:
            stage.liar.name_run("held")
            stage.held = stage.begin(run="held")
            stage.liar.name_run("lies")
        stage.release()
        stage.release()
        found = dict[str, str]()
        for way in WAYS:
            try:
                way(stage)
            except Refused as refusal:
                found[way.__name__] = str(refusal)
    assert found.keys() == {way.__name__ for way in WAYS}
    assert all(f"`{stage.ask.rule}`" in reason for reason in found.values()), found


@pytest.mark.parametrize("noise", [0.0, SHARE])
def test_a_client_that_demands_noise_takes_part_in_no_evaluation(
    tmp_path: Path, noise: float
) -> None:
    """Not even in one whose lanes have noise, since the liar would choose that noise."""
    ask = Ask(budget_for_two(IN_A_SUM), "privacy.mode", evaluation, (measure_lane(noise=noise),))
    with victim(tmp_path, ask) as stage, pytest.raises(Refused, match=r"`privacy\.mode`"):
        stage.release()


def test_a_training_is_no_evaluation_in_disguise(tmp_path: Path) -> None:
    """If the terms sum only metrics, its loss would be an evaluation that is not counted."""
    losses = tuple(
        lane(name, role=LaneRole.METRIC, size=1, noise=SHARE * 2 * LEVELS)
        for name in ("loss", "has_loss")
    )
    ask = Ask(Policy(), "", training, losses)
    with victim(tmp_path, ask) as stage, pytest.raises(Refused, match="ProtocolError"):
        stage.release()
