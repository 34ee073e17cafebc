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
        build_info="1; its labels say which `version` of fedlearn, `python` and `torch` run.",
        ready="1 where clients are served, as /readyz says.",
        lease_held="1 while no other coordinator can have taken over.",
        phase="1 for the `phase` it is in: starting, standby, waiting (for clients), round, "
        "committing, paused, stopping, done.",
    ),
    **_gauges(
        "rounds",
        round="Rounds that are finished.",
        rounds="Rounds that the run is to have.",
    ),
    **_gauges("seconds", round_seconds="What the last round took, waiting included."),
    "round_work_seconds": Meaning(
        "histogram",
        "seconds",
        "What finished rounds took without waiting for clients: to ask, to read and aggregate "
        "replies, to train, evaluate and commit.",
    ),
    **_gauges(
        "clients",
        connected="Clients that are connected.",
        eligible="Of those connected, clients that may be asked.",
        set_aside="Of those connected, clients that are not asked any more since they keep "
        "failing: coordinator.set_aside_after.",
    ),
    **_gauges(
        "clients",
        in_flight_limit="Clients of an asynchronous run that may be in flight: its concurrency, or "
        "fewer while replies come faster than they are folded in; absent in other runs.",
    ),
    **_gauges(
        "check-ins/second",
        check_in_rate="Check-ins that the coordinator can take, by what one costs and how late "
        "its event loop is: those who are told to come back are told to come at this rate.",
    ),
    **_gauges(
        "seconds",
        check_in_seconds="Processor time of a check-in; absent before it is known.",
        loop_late_seconds="Latest measured delay of the gateway's event loop.",
    ),
    **_gauges(
        "fraction",
        accuracy="Of the last central evaluation; absent where the coordinator has no data.",
        clients_accuracy_mean="Of the last evaluation by clients, their mean.",
    ),
    **_gauges(
        "loss",
        loss="Of the last central evaluation; absent where the coordinator has no data.",
        clients_loss_mean="Of the last evaluation by clients, their mean.",
    ),
    **_gauges(
        "epsilon",
        privacy_epsilon="Of what was released, when it was last found, which is now and then; "
        "absent without [privacy].",
    ),
    **_gauges(
        "days",
        certificate_days="Until a certificate ends: `of` the authority, the server (which renews "
        "its own 30 days before), or the active client whose ends first; absent without TLS.",
    ),
    **_gauges(
        "bytes",
        disk_free_bytes="Free on the disk of a `folder`: coordinator (keys and updates on their "
        "way) or runs (database and checkpoints).",
    ),
    **_gauges(
        "steps",
        server_training_step="Of the coordinator's own training of a `kind`, steps or "
        "distillation: taken in the one under way or else the last one, those before included.",
        server_training_steps="Where that training ends.",
        server_training_skipped_steps="Steps of it that were skipped since gradients overflowed.",
    ),
    **_gauges(
        "loss",
        server_training_loss="Of that training: mean over the examples since the report before.",
    ),
    **_gauges(
        "examples/second",
        server_training_examples_per_second="Of that training, likewise, over all processes.",
    ),
    **_gauges(
        "factor",
        server_training_loss_scale="With float16, what its loss is multiplied by; else 1.",
    ),
    **_counters(
        "clients",
        participations="Clients by the `status` in which their round ended: reported, late, "
        "failed, stale.",
    ),
    **_counters(
        "updates",
        updates="Of rounds that take updates of older models: those in the aggregate by their "
        "`staleness`; absent in other runs.",
    ),
    **_counters(
        "connections",
        connections="TLS connections begun; 0 without TLS.",
        enrolment_connections="TLS connections begun, to the port for earlier versions.",
        authenticated="Connections that an enrolled client has made, or one that is invited.",
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
        sent_ahead="Models that clients in flight were told of before they were asked about them: "
        "coordinator.send_ahead.",
    ),
    **_counters(
        "clients",
        check_ins="Clients that have connected and been recognised, whether they may stay or not.",
        paced="Of those, clients that came when too many did, and were told when to come back.",
    ),
    **_counters(
        "messages",
        messages="Messages of sessions received.",
        throttled="Messages of sessions that came faster than they may.",
    ),
    **_counters(
        "bytes",
        bytes_in="Of sessions and uploads received.",
        bytes_out="Of sessions and downloads sent.",
    ),
    **_counters(
        "transfers",
        downloads="Downloads begun.",
        uploads="Uploads begun: replies too large for a message of a session.",
        uploads_resumed="Uploads that went on with what was here.",
        stalled="Transfers ended because nothing moved.",
    ),
    "upload_seconds": Meaning(
        "histogram", "seconds", "From the beginning of an upload, or of its rest, to its last byte."
    ),
    "upload_bytes": Meaning("histogram", "bytes", "Sizes of the replies that came in uploads."),
    **_counters(
        "attempts",
        disk_full="Replies and uploads that could not be written, and attempts to begin a round: "
        "it grows while one waits for space.",
    ),
    **_counters(
        "replies",
        replies_logged="Replies that are durable.",
        replies_accepted="Replies that count.",
        replies_late="Replies that came too late.",
    ),
    **_counters("clients", enrolled="Enrolments."),
    **_counters(
        "refusals",
        refused="Peers, messages and replies turned down, by `reason`; absent until the first.",
    ),
}

#: The meaning of all measures that a run's configuration declares.
OF_THE_RUN: Final = Meaning("gauge", "its own", "A measure of the run's own, under [metrics].")
