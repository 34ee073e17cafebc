"""Records of runs and rounds, as the store saves them and reports read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from fedlearn.core.messages import Scalar
from fedlearn.core.participations import Participations, Status

if TYPE_CHECKING:  # listing runs must not load torch, which is slow
    from torch import Tensor

    from fedlearn.core.client_metrics import ClientMetrics


class RunStatus(StrEnum):
    """Status of a run.

    A simulation is ``lost`` if its record says that it is running but its process is gone. A
    deployed run is ``running`` until it is done or has failed, even while it has no coordinator.
    """

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"


class Outcome(StrEnum):
    """Whether a round changed the model."""

    AGGREGATED = "aggregated"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The stored description of one run.

    Attributes:
        name: Memorable name, unique in its store.
        status: Its status.
        error: Why it failed; empty otherwise.
        created_utc: When it was created, ISO 8601.
        num_rounds: Number of rounds planned.
        config: The resolved configuration tree, JSON values only.
        config_hash: SHA-256 of the canonical JSON of ``config``, hexadecimal.
        versions: Version by package: fedlearn, and the packages that affect its results.
        is_deployed: Whether a coordinator runs it with real clients.
        study: Name of the study that it belongs to; empty: none.
        start_from: Where its initial weights come from, with their digest; empty: the model's own.
            See :class:`fedlearn.rounds.scheduling.Submission`.
    """

    name: str
    status: RunStatus
    error: str
    created_utc: str
    num_rounds: int
    config: Mapping[str, object]
    config_hash: str
    versions: Mapping[str, str]
    is_deployed: bool = False
    study: str = ""
    start_from: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_model(self) -> bool:
        """Whether the run trains a model; a query has none."""
        model = self.config.get("model")
        return not (isinstance(model, Mapping) and model.get("kind") == "none")


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """The stored result of one finished round.

    Attributes:
        round_num: Round index, from 0.
        attempt: Number of retries before this outcome.
        outcome: Whether the model changed.
        participations: One for each client asked (in the last attempt).
        train_loss: Mean training loss of the reports, weighted by examples, or over clients if a
            secure sum weights them equally; NaN if there is none.
        duration_s: Virtual seconds from the broadcast to the close, all attempts together.
        virtual_s: Virtual seconds from the start of the run to the close.
        seconds: Real seconds that the round took, including evaluation.
        metrics: Metrics after the round, by name. Those of the evaluation are absent if none was
            due: ``accuracy`` and ``loss`` of the central one; ``clients/accuracy_mean``, ``_p10``,
            ``_p50``, ``_p90``, ``_worst_decile`` and the same of ``clients/loss`` of the one per
            client; and the run's own metrics, named in the same way. The strategy adds metrics of
            its step, such as ``server_loss``, and in the first round those of its start; a privacy
            ledger adds ``epsilon``. ``num_clipped`` is the number of reports that were scaled
            down: by a clip that is the last transform, or, in simulations without noise, to the
            bounds of a secure sum. ``num_capped``, if not 0, is the number of reports whose loss
            or number of examples such a sum cut off.
        train_metrics: Training metrics of the clients other than the loss, by the clients' own
            names: means over the reports, weighted by examples.
        staleness: Number of updates by staleness, for an asynchronous round. The staleness is the
            number of rounds that have changed the model since it was sent to the client.
        clients: What single clients measured, for a callback; ``None`` if none was evaluated, if
            their values are hidden, and in a record that was read back: a run keeps those of its
            last evaluation only.

    Example:
        >>> import fedlearn as fl
        >>> from fedlearn.core.participations import Participation, Participations, Status
        >>> clients = [Participation(7, Status.REPORTED, 1.5), Participation(9, Status.LATE, 4.0)]
        >>> record = fl.RoundRecord(
        ...     round_num=0, attempt=0, outcome="aggregated",
        ...     participations=Participations.of(clients), train_loss=0.3,
        ...     duration_s=2.0, virtual_s=2.0, seconds=0.01, metrics={"accuracy": 0.9},
        ... )
        >>> record.metrics["accuracy"], record.count(Status.REPORTED), record.count(Status.LATE)
        (0.9, 1, 1)
    """

    round_num: int
    attempt: int
    outcome: Outcome
    participations: Participations
    train_loss: float
    duration_s: float
    virtual_s: float
    seconds: float
    metrics: Mapping[str, float]
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    clients: "ClientMetrics | None" = field(default=None, compare=False, repr=False)

    def count(self, status: Status) -> int:
        """Return how many clients ended with ``status``."""
        return self.participations.num(status)


#: Prefix of the scalars that map a tied tensor's other names to the one under which it is stored.
ALIAS = "alias/"
#: Checkpoint key of the id by which clients know a deployed run.
CLIENTS_RUN = "clients_run"
#: Checkpoint key of the flag that clients have lost their client state since the checkpoint.
CLIENTS_LOST = "clients_lost"


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything that a run needs to resume exactly where it was.

    Attributes:
        round_num: Number of finished rounds.
        tensors: By name: ``params/…``, ``server/…``, ``best/…``, ``clients/…``, ``sampler/…``; in
            an asynchronous run also ``flight/…`` and ``versions/…``.
        values: Scalars of the run's state by name; under :data:`ALIAS` the other names of tied
            tensors, under :data:`CLIENTS_RUN` the id by which clients know a deployed run.
    """

    round_num: int
    tensors: "Mapping[str, Tensor]"
    values: Mapping[str, Scalar]

    def with_client_run(self, run_id: str) -> "Checkpoint":
        """Return this checkpoint for a run that its clients know by ``run_id``.

        If they knew it by another id, as after a rollback, they no longer have their client state.
        """
        is_lost = self.values.get(CLIENTS_RUN, run_id) != run_id
        return replace(self, values={**self.values, CLIENTS_RUN: run_id, CLIENTS_LOST: is_lost})

    def select_tensors(self, prefix: str) -> "dict[str, Tensor]":
        """Return the tensors whose names start with ``prefix``, by the rest of their names."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


class RunStore(Protocol):
    """Durable storage of one run, for the round loop."""

    def append(self, record: RoundRecord) -> None:
        """Add the record of a finished round, which the next :meth:`commit` makes durable."""

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable before returning, atomically.

        Raises:
            StoreError: It could not be written; the previous commit is still valid.
        """

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended."""
