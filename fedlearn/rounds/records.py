"""What a run leaves behind, as values: the language of the store, reports and progress."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from fedlearn.core.collecting import Participations, Status
from fedlearn.core.messages import Scalar

if TYPE_CHECKING:  # who lists runs does not wait for torch
    from torch import Tensor


class RunStatus(StrEnum):
    """Where a run stands.

    A simulation is ``lost`` where its record says that it runs and its process is gone. A deployed
    run is running until it is done or has failed, be there a coordinator at the moment or not.
    """

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"


class Outcome(StrEnum):
    """What a round did to the model."""

    AGGREGATED = "aggregated"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        name: Memorable and unique in its store.
        status: Where it stands.
        error: Why it failed; empty otherwise.
        created_utc: ISO 8601.
        num_rounds: Rounds it is to have.
        config: The resolved configuration tree, JSON values only.
        config_hash: SHA-256 of the canonical JSON of ``config``, hexadecimal.
        versions: Version by package: fedlearn, and what its results rest on.
        is_deployed: Whether a coordinator runs it with real clients.
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


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One finished round.

    Attributes:
        round_num: Index, from 0.
        attempt: How often it was retried before this outcome.
        outcome: Whether the model moved.
        participations: One a client asked (of the last attempt).
        train_loss: Mean training loss of the reports, weighted by examples, or over clients where a
            secure sum weights them alike; NaN if none.
        duration_s: Virtual seconds from broadcast to close, all attempts together.
        virtual_s: Virtual seconds since the run began, at the close.
        seconds: Real seconds the round took, evaluation included.
        metrics: Evaluation after the round by name; empty where none was due. Central:
            ``accuracy``, ``loss``; per client: ``clients/accuracy_mean``, ``_p10``, ``_p50``,
            ``_p90``, ``_worst_decile`` and the same of ``clients/loss``; and metrics of the run's
            own alike. Beside them what the strategy says of its step, such as ``server_loss``, in
            the first round what it said as it began, and ``epsilon``. ``num_clipped`` is how many
            reports were scaled down: by a clip that is the last transform, or, in simulations
            without noise, to the bounds of a secure sum. ``num_capped`` is of how many such a sum
            cut off the loss or the number of examples, where there are any.
        train_metrics: What the clients measured in training beyond the loss, by names of their
            own: means over the reports, weighted by examples.
        staleness: Of an asynchronous round, how many of its updates have which staleness: rounds
            that have changed the model since their clients were sent it.
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

    def count(self, status: Status) -> int:
        """Return how many clients ended with ``status``."""
        return self.participations.num(status)


#: Begins the key of a scalar that says by which name a tied tensor is stored.
ALIAS = "alias/"
#: What names a deployed run to its clients, in its checkpoints.
CLIENTS_RUN = "clients_run"
#: Whether clients have lost what they kept since the checkpoint.
CLIENTS_LOST = "clients_lost"


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything a run needs to go on exactly where it was.

    Attributes:
        round_num: Rounds finished.
        tensors: By name: ``params/…``, ``server/…``, ``best/…``, ``clients/…``; of an asynchronous
            run ``flight/…`` and ``versions/…``.
        values: Scalars of the run's state by name; under :data:`ALIAS` the further names of tied
            tensors, under :data:`CLIENTS_RUN` what names a deployed run to its clients.
    """

    round_num: int
    tensors: "Mapping[str, Tensor]"
    values: Mapping[str, Scalar]

    def for_clients_of(self, run_id: str) -> "Checkpoint":
        """Return this as the state of a run that clients know by ``run_id``.

        Clients keep nothing of a run that they know by another name, as after a rollback.
        """
        is_lost = self.values.get(CLIENTS_RUN, run_id) != run_id
        return replace(self, values={**self.values, CLIENTS_RUN: run_id, CLIENTS_LOST: is_lost})

    def under(self, prefix: str) -> "dict[str, Tensor]":
        """Return the tensors whose names begin so, by the rest of the names."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


class RunStore(Protocol):
    """Durable state of one run, as the run loop sees it."""

    def append(self, record: RoundRecord) -> None:
        """Take the record of a finished round; durable with the next :meth:`commit`."""

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable, together, before returning.

        Raises:
            StoreError: It could not be written; the last commit still stands.
        """

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended."""
