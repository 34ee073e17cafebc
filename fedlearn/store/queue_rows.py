"""The queue's rows, as code that creates and extends runs needs them.

The queue reserves the names of its runs: nothing else can create a run of such a name.
"""

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from fedlearn.errors import StoreError
from fedlearn.rounds.scheduling import QueueState
from fedlearn.store.schema import QueueRow

#: Lock of transactions that give a run its name, in the runs or in the queue.
NAMES_LOCK = 7_306_087_434


class NameTaken(StoreError):
    """Another run has this name, in the runs or in the queue, or its folder exists already."""


def lock_row(session: Session, name: str) -> QueueRow | None:
    """Return the row of the run called ``name``, locked until the transaction ends."""
    return session.scalar(select(QueueRow).where(QueueRow.name == name).with_for_update())


def require_name(session: Session, name: str, *, from_queue: bool) -> QueueRow | None:
    """Check that a run may be created under ``name``; the caller holds :data:`NAMES_LOCK`.

    Returns the run's row in the queue, if it comes from there.

    Args:
        session: The transaction that creates the run.
        name: Name of the run.
        from_queue: Whether the run comes from the queue, where it must be running.

    Raises:
        NameTaken: It does not come from the queue, but the queue has a run of that name.
        StoreError: It comes from the queue, but is not running there.
    """
    row = lock_row(session, name)
    if not from_queue and row is not None:
        raise NameTaken(
            f"the queue has a run called {name!r} (`fedlearn queue`); choose another name"
        )
    if from_queue and (row is None or row.state is not QueueState.RUNNING):
        stands = "is not in the queue" if row is None else f"is {row.state} in the queue"
        raise StoreError(f"run {name!r} {stands}, so it does not start")
    return row


def queue_again(session: Session, name: str) -> None:
    """Queue a run again that was done, if the queue has it."""
    row = lock_row(session, name)
    if row is not None and row.state is QueueState.DONE:
        row.state, row.ended_utc = QueueState.QUEUED, ""


def require_deletable(session: Session, name: str) -> None:
    """Check that the queue needs the run called ``name`` no more; anything else may be deleted.

    Raises:
        StoreError: It is queued or running there, or a run that is not done depends on it.
    """
    row = lock_row(session, name)
    if row is None:
        return
    if not row.state.is_over:
        raise StoreError(
            f"{name} is {row.state} in the queue; cancel it first (`fedlearn cancel {name}`)"
        )
    for each in session.scalars(select(QueueRow).where(QueueRow.state != QueueState.DONE)):
        # A run that was done before lets those after it start, with or without its files.
        waits = each.after == name and row.state is not QueueState.DONE
        starts = each.start_from.get("run") == name and "sha256" not in each.start_from
        if waits or starts:
            raise StoreError(
                f"{each.name}, which is {each.state} in the queue, needs {name}; let it end first"
            )


def delete_from_queue(session: Session, name: str) -> None:
    """Remove a deleted run from the queue, and the condition of the runs after it.

    Raises:
        StoreError: As for :func:`require_deletable`.
    """
    require_deletable(session, name)
    session.execute(update(QueueRow).where(QueueRow.after == name).values(after=""))
    session.execute(delete(QueueRow).where(QueueRow.name == name))
