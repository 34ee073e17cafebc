"""The state that a client keeps between messages: in a folder of its node, or in Flower's context.

With ``identity="/path"`` in the node's configuration::

    identity.pem     the client's keys
    coordinator.key  the coordinator's key in hexadecimal, as it was first seen; remove the file to
                     take part under another one
    pins.json        the identity keys of other clients that the client has pinned
    history.json     by coordinator, the sums that the client has helped to open, over all runs
    constants        the tensors of the last model that stay the same in a run
    lock             held while a message is answered
    state/<run_id>   state of the trainer and sessions of a run; never removed automatically: a
                     SuperNode may have several runs at once, and does not say which are over

Without a folder, all of this is in Flower's ``Context.state``, in the memory of the SuperNode.

Guarantees:
    In a folder the state after a message is durable before its reply leaves, and no two processes
    answer from one state. With Flower 1.41 alone neither holds completely: the process of a
    ClientApp hands over the reply first and its context when it exits, so a process that is killed
    in between has answered, and the next one answers again from the old state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flwr.app import ConfigRecord, Context

from fedlearn.core.files import create_private, make_private_folder, write_private
from fedlearn.core.locks import open_lock, wait_for_lock
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import Identity
from fedlearn.transport.flower.records import KEY_BYTES, format_run_id

#: Name of our record in Flower's context.
_STATE = "fedlearn.state"


def find_folder(context: Context) -> Path | None:
    """Return the folder that this node is configured with for its client; ``None`` if none."""
    value = context.node_config.get("identity")
    return None if value is None else Path(str(value))


@contextmanager
def open_node_store(context: Context) -> Iterator["NodeStore"]:
    """Open the store of this node's client; other processes wait until it is closed.

    Raises:
        DeploymentError: The folder cannot be created, read or written.
    """
    folder = find_folder(context)
    if folder is None:
        yield _ContextStore(context)
        return
    make_private_folder(folder)
    with open_lock(folder / "lock") as file:
        wait_for_lock(file)
        yield _FolderStore(folder, format_run_id(context))


def read_key(text: str, *, source: str) -> bytes:
    """Parse an Ed25519 key in hexadecimal.

    Raises:
        DeploymentError: ``text`` is not a key.
    """
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise DeploymentError(
            f"{source} is not a key: a key has {2 * KEY_BYTES} hexadecimal digits, as the "
            "coordinator prints them when its run starts"
        )
    return key


@dataclass(frozen=True)
class _ContextStore:
    """A store in Flower's context, which lasts as long as the node.

    The client's keys are created on first use. The coordinator's key is empty until it is pinned,
    once; the state is empty until one is stored in this run.
    """

    context: Context

    @property
    def identity(self) -> Identity:
        pem = self._bytes("identity")
        if pem:
            return Identity.from_pem(pem)
        made = Identity.create()
        self._record["identity"] = made.pem
        return made

    @property
    def coordinator_key(self) -> bytes:
        return self._bytes("coordinator_key")

    @property
    def state(self) -> bytes:
        # In a series of runs the context outlives each run, but its sessions do not.
        is_of_this_run = self._record.get("run_id") == format_run_id(self.context)
        return self._bytes("state") if is_of_this_run else b""

    def pin(self, coordinator_key: bytes) -> None:
        if not self.coordinator_key:
            self._record["coordinator_key"] = coordinator_key

    def keep(self, state: bytes) -> None:
        self._record["state"] = state
        self._record["run_id"] = format_run_id(self.context)

    @property
    def constants(self) -> bytes:
        return self._bytes("constants")

    def keep_constants(self, constants: bytes) -> None:
        self._record["constants"] = constants

    @property
    def _record(self) -> ConfigRecord:
        if _STATE not in self.context.state.config_records:
            self.context.state[_STATE] = ConfigRecord()
        return self.context.state.config_records[_STATE]

    def _bytes(self, name: str) -> bytes:
        value = self._record.get(name)
        return value if isinstance(value, bytes) else b""


@dataclass(frozen=True)
class _FolderStore:
    """The same store in a folder on the node's disk."""

    folder: Path
    run_id: str

    @property
    def identity(self) -> Identity:
        return Identity.load_or_create(self.folder)

    @property
    def coordinator_key(self) -> bytes:
        path = self.folder / "coordinator.key"
        return read_key(path.read_text(), source=str(path)) if path.exists() else b""

    @property
    def state(self) -> bytes:
        path = self._state
        return path.read_bytes() if path.exists() else b""

    def pin(self, coordinator_key: bytes) -> None:
        # An existing file stays as it is: the first key remains pinned.
        create_private(self.folder / "coordinator.key", f"{coordinator_key.hex()}\n".encode())

    def keep(self, state: bytes) -> None:
        make_private_folder(self._state.parent)
        write_private(self._state, state)

    @property
    def constants(self) -> bytes:
        path = self.folder / "constants"
        return path.read_bytes() if path.exists() else b""

    def keep_constants(self, constants: bytes) -> None:
        write_private(self.folder / "constants", constants)

    @property
    def _state(self) -> Path:
        return self.folder / "state" / self.run_id


#: A client's store, opened for one message.
NodeStore: TypeAlias = _ContextStore | _FolderStore
