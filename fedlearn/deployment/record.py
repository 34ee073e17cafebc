"""The record of a deployed run: made once, found again by every later coordinator."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fedlearn import build
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.config import Config
from fedlearn.core.clock import Clock
from fedlearn.deployment.live_status import Board
from fedlearn.errors import ConfigError, StoreError, StoreUnavailable
from fedlearn.experiment.simulate import new_record
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunRecord, RunStatus, RunStore
from fedlearn.store.lease import deploy
from fedlearn.store.runs import Database

#: Tables that say where and how a run is served, not what it computes: a restart may change them.
_MAY_CHANGE: Final = ("coordinator", "store", "engine", "devices")

#: Another coordinator may be making the run at this moment: how often and when to look again.
_ATTEMPTS, _AGAIN_S = 20, 0.5


def ensure_deployed(
    database: Database, pieces: build.Deployment, *, name: str, clock: Clock
) -> None:
    """Make the run called ``name`` and deploy it, unless that was done before.

    Raises:
        ConfigError: The run was begun with another configuration.
        StoreError: The run cannot be made.
    """
    for attempt in range(_ATTEMPTS):
        if _is_known(database, name):
            break
        try:
            database.create(replace(new_record(pieces, extra={}), name=name))
        except StoreUnavailable:
            raise
        except StoreError:
            if attempt == _ATTEMPTS - 1:
                raise
            clock.sleep(_AGAIN_S)
    deploy(database, name)
    _require_same(pieces.config, database.run(name).record)


def _is_known(database: Database, name: str) -> bool:
    return any(record.name == name for record in database.runs())


def _require_same(config: Config, record: RunRecord) -> None:
    begun, now = dict(_leaves(record.config)), dict(_leaves(config.model_dump(mode="json")))
    changed = sorted(
        key
        for key in begun | now
        if key.partition(".")[0] not in _MAY_CHANGE and begun.get(key) != now.get(key)
    )
    if changed:
        told = "; ".join(f"{k}: {_text(begun, k)} then, {_text(now, k)} now" for k in changed[:5])
        more = f"; and {len(changed) - 5} more" if changed[5:] else ""
        raise ConfigError(
            f"run {record.name!r} was begun with another configuration: {told}{more}; put back "
            "what was there, or give the new run a name of its own (key `name`)"
        )


def _text(leaves: Mapping[str, object], key: str) -> str:
    return json.dumps(leaves[key], ensure_ascii=False) if key in leaves else "not set"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:  # Any: JSON
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "name":  # the default is a name, too
            yield f"{prefix}{key}", value


def first_attempts(
    last: OpenRound | None, status: RunStatus, policy: StragglerPolicy, *, is_secure: bool = False
) -> dict[int, int]:
    """Return with which attempt the next round begins after a restart, if not with 0.

    A run that failed for want of reports, and is started again, tries as often as at first:
    with attempts of its own, since those before are over. One that was killed among these
    goes on among these.

    Args:
        last: The latest open round of the journal.
        status: Where the run stands.
        policy: How many attempts a round has.
        is_secure: Whether an attempt is a session of secure aggregation: it ended with the process
            that led it, and is not begun again with the same number.

    Example:
        >>> policy = StragglerPolicy(num_wanted=1, over_selection=1.0, deadline_s=1.0,
        ...     min_reports=1, below_minimum=BelowMinimum.RETRY, max_retries=3)
        >>> last = OpenRound(round_num=7, attempt=3, cohort=(), opened_unix_s=0.0)
        >>> first_attempts(last, RunStatus.FAILED, policy)
        {7: 4}
        >>> first_attempts(last, RunStatus.RUNNING, policy)
        {}
    """
    if last is None:
        return {}
    if is_secure:
        return {last.round_num: last.attempt + 1}
    retries = policy.max_retries if policy.below_minimum is BelowMinimum.RETRY else 0
    tried = last.attempt // (retries + 1)
    first = (tried + (status is RunStatus.FAILED)) * (retries + 1)
    return {last.round_num: first} if first else {}


@dataclass(frozen=True, kw_only=True)
class ForgettingStore:
    """A store that forgets, after a commit, how the rounds in it were opened.

    Attributes:
        store: Commits.
        journal: Of the open rounds.
        forget: Removes the replies to rounds before a number.
        board: Told of finished rounds.
    """

    store: RunStore
    journal: RoundJournal
    forget: Callable[[int], None]
    board: Board

    def append(self, record: RoundRecord) -> None:
        """Take the record of a finished round."""
        self.board.finished(record)
        self.store.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable."""
        self.store.commit(checkpoint)
        self.journal.forget(checkpoint.round_num)
        self.forget(checkpoint.round_num)

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended."""
        self.store.finish(status, error=error)
