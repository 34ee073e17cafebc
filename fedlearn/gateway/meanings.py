"""The meaning of each metric of a coordinator: help texts for ``/metrics`` and the reference."""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Meaning(NamedTuple):
    """One metric.

    Attributes:
        kind: Its Prometheus type.
        unit: The unit of its value; a flag is 0 or 1.
        text: Its description, in a sentence.
    """

    kind: Kind
    unit: str
    text: str


def _counters(unit: str, **texts: str) -> dict[str, Meaning]:
    return {name: Meaning("counter", unit, text) for name, text in texts.items()}


def _gauges(unit: str, **texts: str) -> dict[str, Meaning]:
    return {name: Meaning("gauge", unit, text) for name, text in texts.items()}


#: By name, without ``fedlearn_`` and the ``_total`` of a counter. Texts name labels in backticks.
MEANINGS: Final[Mapping[str, Meaning]] = {
    **_gauges(
        "flag",
        build_info="Always 1; labels give the `version` of fedlearn, `python` and `torch`.",
        ready="1 while clients are served, like /readyz.",
        lease_held="1 while no other coordinator can have taken over.",
        phase="1 for the current `phase`: starting, standby, waiting (for clients), round, "
        "committing, paused, stopping, done.",
    ),
    **_gauges(
        "runs",
        runs_at_work="Runs that `fedlearn serve` has at work.",
        runs_queued="Runs that wait in its queue.",
    ),
    **_gauges(
        "rounds",
        round="Finished rounds.",
        rounds="Planned rounds of the run.",
    ),
    **_gauges("seconds", round_seconds="Duration of the last round, including waiting."),
    "round_work_seconds": Meaning(
        "histogram",
        "seconds",
        "Duration of finished rounds without waiting for clients: asking, reading and "
        "aggregating replies, training, evaluating, committing.",
    ),
    **_gauges(
        "clients",
        connected="Connected clients.",
        eligible="Connected clients that may be asked.",
        elsewhere="Of them, those that work for another run of this coordinator now.",
        set_aside="Connected clients that are not asked because they keep failing: "
        "coordinator.set_aside_after.",
        asked="Clients of the open exchange by `phase`: asked (not connected since), connected, "
        "downloading, training, uploading, reported, failed, gone.",
    ),
    **_gauges(
        "clients",
        in_flight_limit="Clients of an asynchronous run that may be in flight: fewer than its "
        "concurrency if replies arrive too fast to aggregate.",
    ),
    **_gauges(
        "check-ins/second",
        check_in_rate="Rate of check-ins that the coordinator can take, at which clients are told "
        "to come back.",
    ),
    **_gauges(
        "seconds",
        check_in_seconds="Processor time of a check-in; absent until it is known.",
        loop_late_seconds="Latest measured delay of the gateway's event loop.",
    ),
    **_gauges(
        "fraction",
        accuracy="Accuracy in the last central evaluation; absent if the coordinator has no data.",
        clients_accuracy_mean="Mean accuracy over clients in their last evaluation.",
    ),
    **_gauges(
        "loss",
        loss="Loss in the last central evaluation; absent if the coordinator has no data.",
        clients_loss_mean="Mean loss over clients in their last evaluation.",
    ),
    **_gauges(
        "epsilon",
        privacy_epsilon="Epsilon of the released models, computed now and then; absent without "
        "[privacy].",
        privacy_epsilon_budget="The budget that it must not exceed, privacy.epsilon; absent if "
        "none is set.",
    ),
    **_gauges(
        "days",
        certificate_days="Days until the certificate `of` the authority, the server or the first "
        "active client ends; absent without TLS.",
    ),
    **_gauges(
        "bytes",
        disk_free_bytes="Free space on the disk of a `folder`: coordinator (keys, upload store) "
        "or runs (database, checkpoints).",
    ),
    **_gauges(
        "steps",
        server_training_step="Steps taken in the current or last training of this `kind` by the "
        "coordinator (steps or distillation), including earlier ones.",
        server_training_steps="Steps after which that training ends.",
        server_training_skipped_steps="Steps of it that were skipped because gradients overflowed.",
    ),
    **_gauges(
        "loss",
        server_training_loss="Mean loss of that training over the examples since the previous "
        "report.",
    ),
    **_gauges(
        "examples/second",
        server_training_examples_per_second="Speed of that training over all processes.",
    ),
    **_gauges(
        "factor",
        server_training_loss_scale="Loss scale with float16; otherwise 1.",
    ),
    **_counters(
        "clients",
        participations="Clients by the `status` in which their round ended: reported, late, "
        "failed, stale.",
        secure_dropouts="Clients lost during secure aggregation by `stage`: advertise, share, "
        "mask, confirm, unmask; absent without it.",
    ),
    **_counters(
        "updates",
        updates="Aggregated updates by `staleness`; only in runs that accept updates of older "
        "models.",
    ),
    **_counters(
        "connections",
        connections="TLS connections started; 0 without TLS.",
        enrolment_connections="TLS connections started to the port for earlier versions.",
        authenticated="Connections of clients that are enrolled or invited.",
        looks="Connections by which invited clients checked that the gateway is reachable.",
    ),
    **_counters(
        "sessions",
        sessions="Sessions opened.",
        sessions_replaced="Sessions ended because their client opened another.",
        sessions_dropped="Sessions ended because their client did not read.",
    ),
    **_counters("clients", sent_away="Clients told to come back later."),
    **_counters(
        "models",
        sent_ahead="Models announced to clients in flight for prefetching: coordinator.send_ahead.",
    ),
    **_counters(
        "clients",
        check_ins="Enrolled clients that connected, whether or not they may stay.",
        paced="Check-ins during a rush, whose clients were told when to come back.",
    ),
    **_counters(
        "messages",
        messages="Messages received in sessions.",
        throttled="Messages in sessions that arrived faster than allowed.",
    ),
    **_counters(
        "bytes",
        bytes_in="Bytes received in sessions and uploads.",
        bytes_out="Bytes sent in sessions and downloads.",
    ),
    **_counters(
        "transfers",
        downloads="Downloads started.",
        uploads="Uploads started: replies too large for a message of a session.",
        uploads_resumed="Uploads that continued from the bytes already stored.",
        stalled="Transfers ended because nothing moved.",
    ),
    "upload_seconds": Meaning(
        "histogram",
        "seconds",
        "Time from the start of an upload, or of its rest, to its last byte.",
    ),
    "upload_bytes": Meaning("histogram", "bytes", "Sizes of uploaded replies."),
    **_counters(
        "attempts",
        disk_full="Failed attempts to store a reply or upload, or to start a round, for lack of "
        "space.",
    ),
    **_counters(
        "replies",
        replies_logged="Replies stored durably.",
        replies_accepted="Replies that count.",
        replies_late="Replies that arrived too late.",
    ),
    **_counters("clients", enrolled="Enrolments."),
    **_counters(
        "refusals",
        refused="Peers, messages and replies that were refused, by `reason`; absent until the "
        "first.",
    ),
}

#: The meaning of all metrics that a run's configuration declares.
RUN_METRIC: Final = Meaning("gauge", "its own", "A metric that the run declares in [metrics].")
