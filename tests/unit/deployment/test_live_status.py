"""A coordinator's gauges and counters during a round, and between evaluations."""

from dataclasses import replace

from fedlearn.core.kinds import DISTILLATION, STEPS
from fedlearn.core.participations import Participations
from fedlearn.deployment.live_status import LiveStatus
from fedlearn.parallel.task import Progress
from fedlearn.rounds.records import Outcome, RoundRecord

PROGRESS = Progress(
    step_num=120,
    num_steps=300,
    loss=0.5,
    examples_per_s=640.0,
    learning_rate=0.1,
    loss_scale=1024.0,
    num_skipped=2,
)
RECORD = RoundRecord(
    round_num=0,
    attempt=0,
    outcome=Outcome.AGGREGATED,
    participations=Participations.of(()),
    train_loss=0.7,
    duration_s=1.0,
    virtual_s=1.0,
    seconds=0.5,
    metrics={"accuracy": 0.9, "loss": 0.3},
)


def test_a_training_of_its_own_is_in_the_gauges() -> None:
    """Each kind of training has its own gauges; before the first report there are none."""
    live_status = LiveStatus()
    assert not any(name.startswith("server_training") for name in live_status.gauges())
    live_status.record_training(STEPS, PROGRESS)
    live_status.record_training(DISTILLATION, replace(PROGRESS, step_num=5, num_steps=5))
    found = {
        name.removeprefix("server_training_"): value
        for name, value in live_status.gauges().items()
        if name.startswith("server_training_") and name.endswith("{kind=steps}")
    }
    assert found == {
        "step{kind=steps}": 120.0,
        "steps{kind=steps}": 300.0,
        "loss{kind=steps}": 0.5,
        "examples_per_second{kind=steps}": 640.0,
        "loss_scale{kind=steps}": 1024.0,
        "skipped_steps{kind=steps}": 2.0,
    }
    assert live_status.gauges()["server_training_step{kind=distillation}"] == 5.0


def test_a_round_that_was_not_evaluated_leaves_the_last_evaluation() -> None:
    """Such a round still has metrics, for example the strategy's own, or the epsilon spent."""
    live_status = LiveStatus()
    live_status.record_round(RECORD)
    live_status.record_round(replace(RECORD, round_num=1, metrics={"server_loss": 0.2}))
    assert live_status.gauges()["accuracy"] == 0.9
    assert live_status.metrics == {"accuracy": 0.9, "loss": 0.3, "server_loss": 0.2}
    live_status.record_round(replace(RECORD, round_num=2, metrics={"accuracy": 0.8, "loss": 0.4}))
    assert live_status.gauges()["accuracy"] == 0.8


def test_the_staleness_of_updates_is_counted_over_rounds() -> None:
    """Counted from the rounds' records; synchronous rounds have no staleness."""
    live_status = LiveStatus()
    live_status.record_round(RECORD)
    assert not any(name.startswith("updates") for name in live_status.counters())
    for staleness in ({0: 3, 2: 1}, {0: 1, 1: 3}):
        live_status.record_round(replace(RECORD, staleness=staleness))
    found = {n: v for n, v in live_status.counters().items() if n.startswith("updates")}
    assert found == {
        "updates{staleness=0}": 4,
        "updates{staleness=2}": 1,
        "updates{staleness=1}": 3,
    }
