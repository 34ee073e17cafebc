"""Every exception that fedlearn raises on purpose.

A failing client raises no exception at the coordinator: its failure is a
:class:`fedlearn.core.messages.Failure` among the replies.
"""

from collections.abc import Iterable, Mapping, Sequence

#: Most characters of a tensor's name in a message; a peer chooses the name, so it may be huge.
_MAX_NAME = 80


class FedlearnError(Exception):
    """Base class of all errors raised by fedlearn.

    Example:
        >>> import fedlearn as fl
        >>> try:
        ...     fl.LocalSgd(epochs=1, batch_size=10)
        ... except fl.FedlearnError as error:
        ...     print(error)
        LocalSgd(): learning_rate is missing; write fl.LocalSgd(epochs=1, batch_size=10, ...
    """


class ConfigError(FedlearnError):
    """The configuration is inconsistent or unsafe; nothing was started."""


class CallError(ConfigError, TypeError):
    """A public function was called with arguments that do not fit its signature."""


class DataError(FedlearnError):
    """The examples are missing or malformed, or cannot be partitioned as configured."""


class RoundError(FedlearnError):
    """A round failed; the server state is as it was before the round."""


class CohortTooSmall(RoundError):
    """Fewer clients are available than the round asks for."""

    def __init__(self, *, available: int, cohort_size: int) -> None:
        super().__init__(
            f"{cohort_size} clients are asked in a round, but the population has {available}; "
            "lower `cohort.num_wanted` or `stragglers.over_selection`, or add clients"
        )
        self.available, self.cohort_size = available, cohort_size


class TooFewNodes(RoundError):
    """Fewer clients joined a Flower run than a round needs."""

    def __init__(
        self, *, present: int, minimum: int, waited_s: float, attendance: str, num_strangers: int
    ) -> None:
        remedies = [
            "start more SuperNodes",
            "raise `patience-s` (flwr run -c patience-s=600)",
            "lower `stragglers.min_reports`",
        ]
        if num_strangers:
            app = "if the nodes' ClientApps were written for Flower alone"
            remedies.append(f'set flower.client_apps to "flower" {app}')
        super().__init__(
            f"{minimum} clients make a round, but {present} came in {waited_s:g} s: {attendance}; "
            f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
        )
        self.present, self.minimum = present, minimum


class TooFewReports(RoundError):
    """A round closed with fewer usable reports than the minimum, or than its buffer takes."""

    def __init__(
        self, *, round_num: int, received: int, minimum: int, failures: str, is_buffer: bool
    ) -> None:
        if is_buffer:
            what = "a buffer takes"
            remedies = (
                "lower `asynchronous.buffer_size`, or raise `stragglers.deadline_s` or "
                "`stragglers.max_retries`"
            )
        else:
            what = "the minimum is"
            remedies = (
                "lower `stragglers.min_reports`, raise `stragglers.deadline_s`, or ask more "
                "clients (`stragglers.over_selection`)"
            )
        super().__init__(
            f"round {round_num + 1}: {received} usable reports when the round closed, {what} "
            f"{minimum} ({failures}); mend the clients that failed, {remedies}"
        )
        self.round_num, self.received, self.minimum = round_num, received, minimum


class NoUpdates(RoundError):
    """A run ended without a single update from its clients."""

    def __init__(self, *, num_rounds: int, failures: str) -> None:
        rounds = "1 round" if num_rounds == 1 else f"{num_rounds} rounds"
        last = f" (in the last one {failures})" if failures else ""
        super().__init__(
            f"no client reported an update in {rounds}, so the model is the initial one{last}; "
            "mend the clients that failed, or raise `stragglers.deadline_s`, and start another run"
        )
        self.num_rounds = num_rounds


class AggregationAborted(RoundError):
    """A session of secure aggregation ended without a sum; a retry begins with fresh keys.

    Attributes:
        stage: Stage that failed: ``advertise``, ``share``, ``mask``, ``confirm`` or ``unmask``.
        reason: Why it failed; never contains a key, a share or a parameter.
        culprits: Ids of the clients known to be at fault.
    """

    def __init__(self, *, stage: str, reason: str, culprits: Iterable[int] = ()) -> None:
        super().__init__(f"secure aggregation ended at the stage `{stage}`: {reason}")
        self.stage, self.reason, self.culprits = stage, reason, frozenset(culprits)


class ModelMismatch(FedlearnError):
    """The coordinator's model and this client's trainer have different tensors.

    The message contains names and shapes but no data, so it is sent to the coordinator in full.
    """

    def __init__(
        self, *, theirs: Mapping[str, Sequence[int]], mine: Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__(
            f"the coordinator's model has {_shapes(theirs)}, this trainer's has {_shapes(mine)}; "
            "use the same model on both sides"
        )


def _shapes(tensors: Mapping[str, Sequence[int]]) -> str:
    if not tensors:
        return "no such tensor"
    name, shape = next(iter(tensors.items()))
    further = f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""
    return f"{name[:_MAX_NAME]} {list(shape)}{further}"


class SettingsRefused(FedlearnError):
    """The local settings are malformed, or ask for what this client's trainer does not support."""


class ProcessesParted(FedlearnError):
    """Processes that share a training cannot continue: one of them failed or died.

    The message names processes and contains no data, so it is sent to the coordinator in full.
    """


class UnusableResult(FedlearnError):
    """A trainer's result is invalid, and is not sent, because the coordinator would refuse it."""


class Diverged(UnusableResult):
    """A training produced values that are not finite or absurdly large."""


class PolicyViolation(FedlearnError):
    """A client refuses a request that its own policy forbids; ``rule`` is the policy's key."""

    def __init__(self, *, rule: str, asked: str, limit: str) -> None:
        super().__init__(
            f"this client's policy, `{rule}`: asked {asked}, allowed {limit}; the client's "
            "operator may change its policy, or the coordinator what it asks"
        )
        self.rule, self.asked, self.limit = rule, asked, limit


class ProtocolError(FedlearnError):
    """A peer sent bytes that are not a valid fedlearn message."""


class OtherVersion(ProtocolError):
    """A peer sent a message in a version that this side cannot read."""


class StoreError(FedlearnError):
    """The record of a run cannot be read or written."""


class UnknownRun(StoreError):
    """The store has no run of that name."""


class CorruptCheckpoint(StoreError):
    """A checkpoint's bytes differ from those that were committed."""


class NewerStore(StoreError):
    """The database or a checkpoint was written by a later version of fedlearn."""


class StoreUnavailable(StoreError):
    """The database is unreachable, or has been busy for long; a retry may succeed later."""


class NoSpace(StoreUnavailable):
    """The disk is full; a retry succeeds once there is space."""


class Fenced(StoreError):
    """Another coordinator has taken over this run; this one may no longer write to it."""


class RunHeld(StoreError):
    """A run is being executed by another process, or by another thread of this one."""

    def __init__(self, *, run: str, holder: str) -> None:
        super().__init__(
            f"run {run!r} is alive: {holder or 'another process'} holds it; let it end, or stop it "
            "first"
        )
        self.run, self.holder = run, holder


class EnrolmentRefused(FedlearnError):
    """A client may not join: its invitation is unknown, used, expired or for another name."""


class ConnectionRefused(FedlearnError):
    """The coordinator rejected the connection of this client, and said why."""


class OtherProtocol(ConnectionRefused):
    """The coordinator does not support this protocol version, or its run needs a newer one."""


class Cancelled(FedlearnError):
    """A task was cancelled before it was done: by the coordinator, the user or the device."""


class Parked(FedlearnError):
    """The coordinator was stopped or paused; the round in progress resumes at the next start."""


class Aborted(FedlearnError):
    """An operator aborted the run; committed rounds are kept."""


class DeploymentError(FedlearnError):
    """A coordinator or a client cannot do what its operator asked."""


class NotPermitted(DeploymentError):
    """An operator gave a command from another machine that its roles do not permit."""


class OutputClosed(FedlearnError):
    """The reader of standard output closed it, as ``head`` does when it has enough."""

    def __init__(self) -> None:
        super().__init__("standard output was closed by who reads it")


class EngineError(FedlearnError):
    """The simulation engine cannot do what the configuration asks, or a worker died."""


class BundleFailed(FedlearnError):
    """The code of a bundle raised an error; the message may quote the data."""


class BundleEnded(FedlearnError):
    """The process of a bundle exceeded a limit, or died; the message quotes nothing of it."""


class BundleRefused(FedlearnError):
    """A bundle may not run on this client, or cannot; the message says why."""


class BudgetExhausted(FedlearnError):
    """The next round would exceed the privacy budget; the model is that of the last round."""

    def __init__(
        self,
        *,
        epsilon: float,
        target_delta: float,
        spent: float,
        next_epsilon: float,
        num_charged: int,
        study: str = "",
    ) -> None:
        whose = f" of the study {study}" if study else ""
        remedy = (
            "Add noise, or use another data set of the study"
            if study
            else "Raise the budget, or, if the data are others', say so in "
            "privacy.other_data_because"
        )
        super().__init__(
            f"the privacy budget{whose} is spent: {num_charged} rounds are charged to these "
            f"clients, epsilon {spent:.4g} at delta {target_delta:g}; another would make it "
            f"{next_epsilon:.4g}, above {'it' if study else 'privacy.epsilon'} ({epsilon:g}). "
            f"{remedy}"
        )
        self.epsilon, self.spent, self.num_charged = epsilon, spent, num_charged
