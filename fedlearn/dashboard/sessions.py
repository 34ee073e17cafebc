"""Sessions of signed-in users, and sign-ins that have begun: on the server only.

A browser has a random id in a cookie, of which this process keeps a digest. Nothing survives the
process: after a restart, users sign in again.
"""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import Generic, TypeVar

from fedlearn.core.clock import Clock
from fedlearn.core.secret_bytes import SecretBytes

T = TypeVar("T")

_ID_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class PageSession:
    """A signed-in user.

    Attributes:
        operator: Name of the operator.
        identity: What the provider says who it is, for the log.
    """

    operator: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class BegunSignIn:
    """A sign-in that waits for the user to come back from the provider; all values are secret.

    Attributes:
        state: Comes back in the URL; the user's browser began this sign-in.
        nonce: Comes back in the token; it was issued for this sign-in.
        verifier: Proves to the provider that this process began the sign-in (PKCE).
        next_path: Where the user wanted to go.
    """

    state: str
    nonce: str
    verifier: str
    next_path: str


class Kept(Generic[T]):
    """Values by random id, each for ``for_s`` seconds, the latest ``most`` of them."""

    def __init__(self, *, clock: Clock, for_s: float, most: int) -> None:
        self._clock, self._for_s, self._most = clock, for_s, most
        self._values: OrderedDict[str, tuple[float, T]] = OrderedDict()
        self._lock = Lock()

    def add(self, value: T) -> str:
        """Keep a value, and return its new id."""
        new = new_secret()
        with self._lock:
            self._values[_digest(new)] = self._clock.now_s() + self._for_s, value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return new

    def find(self, id_: str) -> T | None:
        """Return the value of an id; ``None`` if there is none, or its time is over."""
        with self._lock:
            ends_s, value = self._values.get(_digest(id_), (0.0, None))
            return value if self._clock.now_s() < ends_s else None

    def take(self, id_: str) -> T | None:
        """Return a value as :meth:`find` does, and forget it: an id works once."""
        value = self.find(id_)
        with self._lock:
            self._values.pop(_digest(id_), None)
        return value


def new_secret() -> str:
    """Return 256 random bits, hexadecimal."""
    return SecretBytes.generate(_ID_BYTES).reveal().hex()


def _digest(id_: str) -> str:
    # What is kept cannot be used as a cookie, and a look-up tells nothing by its time.
    return sha256(id_.encode()).hexdigest()
