"""What a client's process is started with."""

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
from fedlearn.core.ranges import Count, out_of_range
from fedlearn.errors import ConfigError
from fedlearn.transport.addresses import require_addresses


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How a client finds its coordinator, and whose keys it believes there.

    Attributes:
        addresses: Of a coordinator that has moved, each ``host:port``; tried before those of the
            invitation and those that the coordinator has announced.
        roster: The operator's list of identity keys, checked with the other users: in secure
            aggregation these clients are believed and no others; ``None``: the coordinator is
            believed where it first tells identity keys.
        reconnection: How soon the coordinator is looked for again, and for how long it may send
            this client away.

    Raises:
        DeploymentError: An address is none.

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
        num_threads: Threads that torch may use, in each process that trains. Masks of secure
            aggregation are expanded on as many as there are cores.
        num_workers: Processes that share each training, data-parallel; more than one are for a
            :class:`~fedlearn.training.torch_trainer.TorchTrainer`.
        niceness: 0 is a program like any other, 19 gives way to all others.

    Raises:
        ConfigError: A value is out of range.
    """

    num_threads: Count = 1
    num_workers: Count = 1
    niceness: Annotated[int, Ge(0), Le(19)] = 10

    def __post_init__(self) -> None:
        if wrong := out_of_range(self):
            raise ConfigError(f"resources.{wrong}")


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How one client takes part: what :class:`~fedlearn.client.agent.Agent` is given.

    Attributes:
        trainer: Its name, ``"module:Class"`` or ``"path/file.py:Class"``.
        exit_code: What the process before this one ended with, in the same application, unless it
            was asked to end; negative: the number of the signal that killed it. ``None``: there was
            none.
        is_command: Whether this is the training process of ``fedlearn join``. Its user reads
            standard error: it logs as all commands do, and an error in making the trainer is
            reported with its message. The trainer may lie in the working directory.
        log_level: Events below this level are dropped; a constant of :mod:`logging`.
    """

    home: Path
    trainer: str
    invitation: Path | None = None
    conditions: Conditions = field(default_factory=Conditions)
    policy: Policy = field(default_factory=Policy)
    connection: Connection = field(default_factory=Connection)
    resources: Resources = field(default_factory=Resources)
    exit_code: int | None = None
    is_command: bool = False
    log_level: int = logging.WARNING


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What an application changes of a client that runs; see :class:`RuntimeOptions`."""

    conditions: Conditions
    policy: Policy


@dataclass(frozen=True)
class Wake:
    """The client is to look for its coordinator now, whatever it waits for there."""


@dataclass(frozen=True)
class Stop:
    """The client is to end at its next batch, or at once if it is still starting."""


#: To and from the JSON that another process is told.
OPTIONS = TypeAdapter(RuntimeOptions)
CHANGES = TypeAdapter(Changes)
