"""The options that a training process is started with, and commands sent to it later."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import TypeAdapter

from fedlearn.client.backoff import Reconnection
from fedlearn.client.conditions import Conditions
from fedlearn.client.policy import Policy
from fedlearn.core.log_format import LogFormat
from fedlearn.core.ranges import Count, describe_out_of_range
from fedlearn.core.trace_settings import TraceSettings
from fedlearn.errors import ConfigError
from fedlearn.transport.addresses import require_addresses


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How a client finds its coordinator, and which clients' identity keys it trusts.

    Attributes:
        addresses: Addresses of a coordinator that has moved, each ``host:port``. They are tried
            before those in the invitation and those that the coordinator has announced.
        roster: Path of the operator's list of identity keys, which users should verify with each
            other. In secure aggregation, only the clients in it are trusted. ``None`` trusts the
            identity keys that the coordinator sends first.
        reconnection: How soon to reconnect, and how long an absence the coordinator may ask for.

    Raises:
        DeploymentError: An address is malformed.

    Example:
        >>> Connection(addresses=["new.example.org:443"]).addresses
        ('new.example.org:443',)
    """

    addresses: Sequence[str] = ()
    roster: Path | str | None = None
    reconnection: Reconnection = field(default_factory=Reconnection)

    def __post_init__(self) -> None:
        object.__setattr__(self, "addresses", require_addresses(self.addresses))
        if self.roster is not None:  # the training process may have another working directory
            object.__setattr__(self, "roster", Path(self.roster).expanduser().resolve())


@dataclass(frozen=True, kw_only=True)
class Resources:
    """How much of a device training may use.

    Attributes:
        num_threads: Threads that torch may use in each training process, >= 1. Expanding the masks
            of secure aggregation uses one thread per core regardless.
        num_workers: Data-parallel processes that share each training, >= 1; more than one require a
            :class:`~fedlearn.training.torch_trainer.TorchTrainer`.
        niceness: Scheduling priority, from 0 (normal) to 19 (yields to all other programs).

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> Resources(num_threads=4)
        Resources(num_threads=4, num_workers=1, niceness=10)
    """

    num_threads: Count = 1
    num_workers: Count = 1
    niceness: Annotated[int, Ge(0), Le(19)] = 10

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ConfigError(f"resources.{wrong}")


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """All options of one training process; see also :class:`~fedlearn.client.agent.Agent`.

    Attributes:
        home: The client's folder.
        trainer: Name of the trainer, ``"module:Class"`` or ``"path/file.py:Class"``; ``None``: the
            client takes part only in runs that ship a bundle.
        invitation: The invitation file, if one was given.
        conditions: What must hold before and during training.
        policy: What the client refuses.
        connection: How to find the coordinator.
        resources: How much of the device training may use.
        exit_code: Exit code of the previous training process in the same application if it
            crashed; negative for the number of the signal that killed it. ``None`` if there was
            none, or if it ended as intended.
        is_command: Whether this is the training process of ``fedlearn join``. Its user reads
            standard error, so it logs like all commands, and an error while creating the trainer is
            reported with its message. The trainer may be in the working directory.
        log_level: Log events below this level are dropped; a constant of :mod:`logging`.
        log_format: How lines of the log are written, if this is a command's process.
        traces: Whether and where traces are sent.

    Raises:
        ConfigError: Several workers share a training, and several trainings run at a time.
    """

    home: Path
    trainer: str | None
    invitation: Path | None = None
    conditions: Conditions = field(default_factory=Conditions)
    policy: Policy = field(default_factory=Policy)
    connection: Connection = field(default_factory=Connection)
    resources: Resources = field(default_factory=Resources)
    exit_code: int | None = None
    is_command: bool = False
    log_level: int = logging.WARNING
    log_format: LogFormat = LogFormat.AUTO
    traces: TraceSettings = field(default_factory=TraceSettings)

    def __post_init__(self) -> None:
        num_runs, num_workers = self.policy.max_concurrent_runs, self.resources.num_workers
        if num_runs > 1 and num_workers > 1:
            raise ConfigError(
                f"policy.max_concurrent_runs is {num_runs}, and {num_workers} workers share each "
                "training; set one of the two to 1"
            )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Command: replace the conditions and the policy; see :class:`RuntimeOptions`."""

    conditions: Conditions
    policy: Policy


@dataclass(frozen=True)
class Wake:
    """Command: try to connect now, without waiting any longer."""


@dataclass(frozen=True)
class Stop:
    """Command: stop at the next batch, or at once if the process is still starting."""


#: Convert to and from the JSON that is sent to the training process.
OPTIONS = TypeAdapter(RuntimeOptions)
CHANGES = TypeAdapter(Changes)
