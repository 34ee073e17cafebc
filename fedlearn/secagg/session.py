"""What both sides derive from the terms and the roster: ids, points, neighbours."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.messages import ClientId
from fedlearn.secagg import keys, octets
from fedlearn.secagg.graph import Topology, ring
from fedlearn.secagg.messages import ADVERT, Advert, Adverts
from fedlearn.secagg.parameters import Adversary, num_holders
from fedlearn.secagg.terms import Terms

#: Terms among what a client keeps, where more follows.
OwnTerms: TypeAlias = Annotated[Terms, octets.sized(4).mapped(Terms.to_bytes, Terms.from_bytes)]


class Stage(StrEnum):
    """A step of the protocol."""

    ADVERTISE = "advertise"
    SHARE = "share"
    MASK = "mask"
    CONFIRM = "confirm"
    UNMASK = "unmask"


@dataclass(frozen=True, eq=False)
class Session:
    """A roster under terms: the adverts of all that take part, by ascending id."""

    terms: OwnTerms
    adverts: Adverts

    @cached_property
    def id(self) -> bytes:
        """The hash of terms and roster: salt of every key, part of every signature."""
        adverts = b"".join(map(ADVERT.to_bytes, self.adverts))
        return keys.digest(b"session", self.terms.session, adverts)

    @cached_property
    def by_id(self) -> Mapping[ClientId, Advert]:
        """The adverts by client."""
        return {advert.client_id: advert for advert in self.adverts}

    @cached_property
    def points(self) -> Mapping[ClientId, int]:
        """Where each client's shares are evaluated: its position in the roster, from 1."""
        return {advert.client_id: at for at, advert in enumerate(self.adverts, start=1)}

    @cached_property
    def _ring(self) -> NDArray[np.int64]:
        """The neighbours in a sparse graph; whoever tries rosters tries seeds of it."""
        seed, k = keys.digest(b"graph", self.id), self.terms.num_neighbours
        return ring(len(self.adverts), num_neighbours=k, seed=seed)

    def neighbours(self, client_id: ClientId) -> list[ClientId]:
        """Return who masks with a client, by ascending id."""
        if self.terms.topology is Topology.COMPLETE:
            return [each for each in self.points if each != client_id]
        places = self._ring[self.points[client_id] - 1]
        return [self.adverts[place].client_id for place in places]

    def holders(self, client_id: ClientId) -> list[ClientId]:
        """Return who keeps shares of a client's secrets, by ascending id."""
        complete = self.terms.topology is Topology.COMPLETE
        return list(self.points) if complete else self.neighbours(client_id)

    @property
    def shortage(self) -> str | None:
        """Why the roster is too small for the terms; None if it is not."""
        size, terms = len(self.adverts), self.terms
        if size < terms.min_survivors:
            return f"{size} clients in the roster, the least is {terms.min_survivors}"
        if terms.adversary is Adversary.ACTIVE_SERVER and size < terms.quorum:
            return f"{size} clients in the roster, the quorum is {terms.quorum}"
        k = min(terms.num_neighbours, size - 1)
        if terms.topology is Topology.SPARSE and k == size - 1:
            return f"{size} clients are too few for a sparse graph with {k} neighbours"
        if num_holders(size, k) < terms.threshold:
            return f"{num_holders(size, k)} holders, the threshold is {terms.threshold}"
        return None

    def survivors_text(self, survivors: Iterable[ClientId]) -> bytes:
        """Return what is signed to confirm who survived."""
        ids = b"".join(client_id.to_bytes(8, "little") for client_id in sorted(survivors))
        return keys.signed(b"survivors", self.id, ids)


def advert_text(terms: Terms, body: bytes) -> bytes:
    """Return what a client signs of its advert."""
    return keys.signed(b"advert", terms.session, body)


def terms_text(terms: Terms) -> bytes:
    """Return what the coordinator signs of its terms."""
    return keys.signed(b"terms", terms.to_bytes())
