"""Sign checkpoints of the audit log while a coordinator leads."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog

from fedlearn.errors import DeploymentError, StoreError
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit_checkpoints import sign_checkpoint
from fedlearn.store.runs import Database

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class LogSigner:
    """A thread that signs the newest entry every ``every_s`` seconds, and when the block ends.

    Nothing is signed twice. If the database cannot be written, the next turn tries again. The key
    is read each time: it may have been replaced meanwhile.
    """

    database: Database
    keys_folder: Path
    every_s: float = 600.0
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="log-signer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread, and sign what the block has added."""
        self._stopped.set()
        self._thread.join()
        self._sign()

    def _run(self) -> None:
        while not self._stopped.wait(self.every_s):
            self._sign()

    def _sign(self) -> None:
        try:
            with self.database.writing() as session:
                sign_checkpoint(session, SigningKey(self.keys_folder))
        except (StoreError, DeploymentError) as error:
            _log.warning("audit_log_not_signed", reason=str(error))
