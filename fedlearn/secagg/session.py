"""What both sides derive from the terms and the roster: ids, points, neighbours."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fedlearn.core.messages import ClientId
from fedlearn.secagg import keys
from fedlearn.secagg.graph import MaskGraph, Topology
from fedlearn.secagg.messages import Advert
from fedlearn.secagg.parameters import num_holders
from fedlearn.secagg.terms import Terms


class Stage(StrEnum):
    """A step of the protocol."""

    ADVERTISE = "advertise"
    SHARE = "share"
    MASK = "mask"
    CONFIRM = "confirm"
    UNMASK = "unmask"


@dataclass(frozen=True, eq=False)
class Session:
    """A roster under terms.

    Attributes:
        terms: Of the session.
        adverts: Of all that take part, by ascending id.
    """

    terms: Terms
    adverts: tuple[Advert, ...]

    @cached_property
    def id(self) -> bytes:
        """The hash of terms and roster: salt of every key, part of every signature."""
        adverts = b"".join(advert.body() for advert in self.adverts)
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
    def graph(self) -> MaskGraph:
        """Who masks with whom; its seed is the hash that nobody chose."""
        if self.terms.topology is Topology.COMPLETE:
            return MaskGraph.complete(len(self.adverts))
        seed = keys.digest(b"graph", self.id)
        k = self.terms.num_neighbours
        return MaskGraph.sparse(len(self.adverts), num_neighbours=k, seed=seed)

    def neighbours(self, client_id: ClientId) -> list[ClientId]:
        """Return who masks with a client, by ascending id."""
        places = self.graph.neighbours(self.points[client_id] - 1)
        return [self.adverts[place].client_id for place in places]

    def holders(self, client_id: ClientId) -> list[ClientId]:
        """Return who keeps shares of a client's secrets, by ascending id."""
        found = self.neighbours(client_id)
        return sorted([*found, client_id]) if self.graph.is_complete else found

    @property
    def shortage(self) -> str | None:
        """Why the roster is too small for the terms; None if it is not."""
        size, terms = len(self.adverts), self.terms
        if size < terms.min_survivors:
            return f"{size} clients in the roster, the least is {terms.min_survivors}"
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
