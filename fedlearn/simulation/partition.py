"""Partitions: rules that divide pooled examples among clients, each example to exactly one client.

Each rule is a frozen dataclass with a method ``split``, whose result depends on the labels and the
seed alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self

import numpy as np
from annotated_types import doc
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr

from fedlearn.core.calls import explain_calls
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count, NotNegative, Positive, Ranged
from fedlearn.errors import DataError

_MAX_DRAWS = 1000
#: A probability that counts as 0.
_NEXT_TO_NOTHING = 1e-7


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of each client, as one list of rows and the offset of each client in it.

    Attributes:
        rows: Row numbers, the clients one after another: int64 [N].
        offsets: Client k holds ``rows[offsets[k]:offsets[k + 1]]``: int64 [C + 1].
        names: The clients' names in the data: [C]; ``None`` if they have no names.

    Raises:
        DataError: Offsets do not rise from 0 to the number of rows, or the number of names is not
            that of clients.
    """

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    names: NDArray[Any] | None = None  # integers or strings, as the data has them

    def __post_init__(self) -> None:
        ends = self.offsets[[0, -1]].tolist() if self.offsets.size > 1 else []
        if ends != [0, self.rows.size]:
            raise DataError(
                f"a partition's offsets must rise from 0 to its {self.rows.size} rows, with one "
                f"more offset than clients, but are {self.offsets.tolist()[:3]}...; build it with "
                "`Partition.of_owners`"
            )
        empty = np.flatnonzero(np.diff(self.offsets) < 1)
        if empty.size:
            raise DataError(
                f"{self.client(int(empty[0]))} has no examples ({empty.size} of "
                f"{self.num_clients} clients are empty); use fewer clients or leave the empty ones "
                "out"
            )
        if self.names is not None and len(self.names) != self.num_clients:
            raise DataError(
                f"{len(self.names)} names for {self.num_clients} clients; give one per client"
            )

    @classmethod
    def of_owners(
        cls, owners: NDArray[np.int64], *, num_clients: int, names: NDArray[Any] | None = None
    ) -> Self:
        """Build the partition in which row i belongs to client ``owners[i]``.

        A client's rows are in ascending order.

        Raises:
            DataError: A client owns nothing.
        """
        offsets = offsets_of(np.bincount(owners, minlength=num_clients))
        return cls(np.argsort(owners, kind="stable").astype(np.int64), offsets, names)

    @property
    def num_clients(self) -> int:
        """C, the number of clients."""
        return self.offsets.size - 1

    def rows_of(self, client_id: int) -> NDArray[np.int64]:
        """Return the rows of one client."""
        return self.rows[self.offsets[client_id] : self.offsets[client_id + 1]]

    def client(self, client_id: int) -> str:
        """Format a client for a message: its number, with its name if it has one."""
        return client_text(client_id, self.names)

    def owner_of(self, row: int) -> int | None:
        """Return the client that holds ``row``, or ``None`` if no client does."""
        places = np.flatnonzero(self.rows == row)
        if not places.size:
            return None
        return int(np.searchsorted(self.offsets, places[0], side="right")) - 1


def client_text(client_id: int, names: Sequence[Any] | NDArray[Any] | None) -> str:
    """Format a client for a message: its number, with its name if that is not the number.

    Example:
        >>> client_text(1, ["ada", "zoe"]), client_text(1, None)
        ("client 1 ('zoe')", 'client 1')
    """
    if names is None or client_id >= len(names):
        return f"client {client_id}"
    name = names[client_id]
    name = name.item() if isinstance(name, np.generic) else name
    return f"client {client_id}" if name == client_id else f"client {client_id} ({name!r})"


def offsets_of(sizes: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Return the starts of consecutive ranges of these sizes, and the end of the last."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


class Partitioner(Protocol):
    """A rule that divides examples among clients."""

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:
        """Assign every row of ``labels`` to exactly one client.

        Raises:
            DataError: The examples cannot be divided as asked.
        """


@explain_calls
@dataclass(frozen=True)
class Iid(Ranged):
    """Random clients of equal size: sizes differ by at most one.

    Example:
        >>> Iid(3).split(np.zeros(7), seed=Seed(0)).offsets
        array([0, 3, 5, 7])
    """

    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")]

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:
        """Divide the examples at random into equal parts.

        Raises:
            DataError: There are fewer examples than clients.
        """
        _require_enough(len(labels), needed=self.num_clients, what=f"{self.num_clients} clients")
        owners = np.empty(len(labels), np.int64)
        order = seed.derive("iid").numpy().permutation(len(labels))
        # Dealing in turns keeps the sizes within one of each other.
        owners[order] = np.arange(len(labels)) % self.num_clients
        return Partition.of_owners(owners, num_clients=self.num_clients)


@explain_calls
@dataclass(frozen=True)
class Dirichlet(Ranged):
    r"""Label skew: each class is divided in proportions drawn from a Dirichlet distribution.

    Per class k, with C clients, :math:`p_k \sim \mathrm{Dir}_C(\alpha)`, and client c gets the
    share :math:`p_{k,c}` of that class. All classes are drawn again until every client has
    ``min_examples``, at most 1000 times. A split with almost no chance of success is refused
    after a few draws.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> skewed = fl.Dirichlet(num_clients=4, alpha=0.5, min_examples=5)
        >>> parts = skewed.split(np.arange(100) % 10, seed=fl.Seed(0))
        >>> sizes = [len(parts.rows_of(each)) for each in range(4)]
        >>> sum(sizes), min(sizes) >= 5
        (100, True)

    References:
        Hsu, Qi and Brown, 2019, `Measuring the Effects of Non-Identical Data Distribution
        for Federated Visual Classification <https://arxiv.org/abs/1909.06335>`_ (Dirichlet
        label skew); Li et al., 2022, `Federated Learning on Non-IID Data Silos
        <https://arxiv.org/abs/2102.02079>`_ (proportions per class, the form used here).
    """

    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")]
    alpha: Annotated[Positive, doc("Concentration, > 0: 0.1 is strong skew, 100 nearly none.")]
    min_examples: Annotated[
        Count,
        doc(
            "Minimum number of examples per client, >= 1; proportions are redrawn until it is met."
        ),
    ]

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:
        """Divide the examples into clients with skewed labels and sizes.

        Raises:
            DataError: Labels are not classes, there are too few, no draw gave every client
                ``min_examples``, or none is likely to.
        """
        _require_classes(labels)
        needed = self.num_clients * self.min_examples
        what = f"{self.num_clients} clients with {self.min_examples} each"
        _require_enough(len(labels), needed=needed, what=what)
        rng = seed.derive("dirichlet").numpy()
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        sizes_KC = self._draw_sizes(counts, rng)
        owners = np.empty(len(labels), np.int64)
        for k, sizes in enumerate(sizes_KC):
            members = rng.permutation(np.flatnonzero(classes == k))
            owners[members] = np.repeat(np.arange(self.num_clients), sizes)
        return Partition.of_owners(owners, num_clients=self.num_clients)

    def _draw_sizes(self, counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        concentration, best, num_served = np.full(self.num_clients, self.alpha), 0, 0
        for num_draws in range(1, _MAX_DRAWS + 1):
            shares_KC = rng.dirichlet(concentration, counts.size)
            cuts = (np.cumsum(shares_KC, axis=1) * counts[:, None]).astype(np.int64)
            # The shares sum to 1 only up to rounding; the last client must not lose an example to
            # that.
            cuts[:, -1] = counts
            sizes_KC = np.diff(cuts, prepend=0, axis=1)
            sizes_C = sizes_KC.sum(axis=0)
            if (smallest := int(sizes_C.min())) >= self.min_examples:
                return sizes_KC
            best = max(best, smallest)
            num_served += int((sizes_C >= self.min_examples).sum())
            if self._is_hopeless(num_served, num_draws=num_draws):
                break
        share = num_served / (num_draws * self.num_clients)
        raise DataError(
            f"{num_draws} draws of Dirichlet({self.alpha:g}) over {self.num_clients} clients: "
            f"{share:.1%} of clients had the required {self.min_examples} examples, and the "
            f"smallest client had at most {best}; raise `alpha`, lower `min_examples`, or use "
            "fewer clients"
        )

    def _is_hopeless(self, num_served: int, *, num_draws: int) -> bool:
        """Return whether the remaining draws have almost no chance of success.

        Let q be the probability that a client gets its ``min_examples``. Dirichlet shares are
        negatively associated, so one draw succeeds for all C clients with probability at most
        q ** C. Chernoff's bound tells when the clients drawn so far rule out every q for which
        ``_MAX_DRAWS`` draws have a chance.

        References:
            Joag-Dev and Proschan, 1983, "Negative Association of Random Variables with
            Applications".
        """
        num_sampled = num_draws * self.num_clients
        # The q at which 1,000 draws succeed with probability 1e-7 at most (union bound): q^C = 1e-7
        # / 1000.
        needed = (_NEXT_TO_NOTHING / _MAX_DRAWS) ** (1 / self.num_clients)
        found = num_served / num_sampled
        if found >= needed:
            return False
        # Chernoff: P(observed share <= found) <= exp(-n * KL(found || needed)).
        divergence = float(rel_entr(found, needed) + rel_entr(1 - found, 1 - needed))
        return num_sampled * divergence > -math.log(_NEXT_TO_NOTHING)


@explain_calls
@dataclass(frozen=True)
class Shards(Ranged):
    """Label skew by shards: sort by label, cut into shards, and give each client a few.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> labels = np.arange(100) % 10
        >>> parts = fl.Shards(num_clients=5, shards_per_client=2).split(labels, seed=fl.Seed(0))
        >>> [len(set(labels[parts.rows_of(each)])) for each in range(5)]  # labels of each client
        [2, 2, 2, 2, 2]

    References:
        McMahan et al., 2017, `arXiv:1602.05629 <https://arxiv.org/abs/1602.05629>`_,
        section 3.
    """

    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")]
    shards_per_client: Annotated[
        Count, doc("Shards per client, >= 1; 2 is the paper's pathological split.")
    ]

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:
        """Give each client ``shards_per_client`` random shards; shard sizes differ by at most one.

        Raises:
            DataError: Labels are not classes, or there are fewer examples than shards.
        """
        _require_classes(labels)
        num_shards = self.num_clients * self.shards_per_client
        _require_enough(len(labels), needed=num_shards, what=f"{num_shards} shards")
        holders = seed.derive("shards").numpy().permutation(num_shards) // self.shards_per_client
        owners = np.empty(len(labels), np.int64)
        # Integer arithmetic keeps the sizes of shards within one of each other.
        shard_of_place = np.arange(len(labels)) * num_shards // len(labels)
        owners[np.argsort(labels, kind="stable")] = holders[shard_of_place]
        return Partition.of_owners(owners, num_clients=self.num_clients)


@explain_calls
@dataclass(frozen=True)
class FewClasses(Ranged):
    """Label skew by classes: each client has the same small number of them.

    Client c gets class ``c % K``, of K classes, and random others. A class that no client has yet
    goes to a random client with room, which happens with fewer clients than classes only. The
    examples of a class are shuffled and shared evenly by its clients.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> labels = np.arange(100) % 10
        >>> three = fl.FewClasses(num_clients=8, classes_per_client=3)
        >>> parts = three.split(labels, seed=fl.Seed(0))
        >>> {len(set(labels[parts.rows_of(each)])) for each in range(8)}  # classes of each client
        {3}

    References:
        Li et al., 2022, `Federated Learning on Non-IID Data Silos
        <https://arxiv.org/abs/2102.02079>`_, "#C=k" (quantity-based label imbalance).
    """

    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")]
    classes_per_client: Annotated[Count, doc("Classes of each client, >= 1.")]

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:
        """Give each client its classes, and an even share of the examples of each.

        Raises:
            DataError: As for :meth:`draw`.
        """
        return self.draw(labels, rng=seed.derive("few classes").numpy())

    def draw(self, labels: NDArray[Any], *, rng: np.random.Generator) -> Partition:
        """Divide the examples as :meth:`split` does, with the generator's draws.

        Raises:
            DataError: Labels are not classes, there are fewer classes than a client is to have or
                more than all clients have together, or a class has fewer examples than clients.
        """
        _require_classes(labels)
        names, classes = np.unique(labels, return_inverse=True)
        holders = self._draw_holders(names, rng)
        owners = np.empty(len(labels), np.int64)
        for k, (name, clients) in enumerate(zip(names.tolist(), holders, strict=True)):
            rows = np.flatnonzero(classes == k)
            if len(rows) < len(clients):
                raise DataError(
                    f"class {name} has {len(rows)} examples for the {len(clients)} clients that "
                    "have it; lower `num_clients` or `classes_per_client`, or add data"
                )
            rng.shuffle(rows)
            for client_id, part in zip(clients, np.array_split(rows, len(clients)), strict=True):
                owners[part] = client_id
        return Partition.of_owners(owners, num_clients=self.num_clients)

    def _draw_holders(self, names: NDArray[Any], rng: np.random.Generator) -> list[list[int]]:
        """Draw the clients of each class."""
        num_classes, wanted = len(names), self.classes_per_client
        if wanted > num_classes:
            raise DataError(
                f"classes_per_client is {wanted}, but the examples are of {num_classes} classes; "
                "lower it"
            )
        if self.num_clients * wanted < num_classes:
            raise DataError(
                f"{self.num_clients} clients with {wanted} classes each leave some of the "
                f"{num_classes} classes out; raise `num_clients` or `classes_per_client`"
            )
        own = [[client_id % num_classes] for client_id in range(self.num_clients)]
        for k in range(self.num_clients, num_classes):
            room = [client_id for client_id, mine in enumerate(own) if len(mine) < wanted]
            own[room[int(rng.integers(len(room)))]].append(k)
        holders: list[list[int]] = [[] for _ in range(num_classes)]
        for client_id, mine in enumerate(own):
            while len(mine) < wanted:
                k = int(rng.integers(num_classes))
                if k not in mine:
                    mine.append(k)
            for k in mine:
                holders[k].append(client_id)
        return holders


@explain_calls
@dataclass(frozen=True)
class DirichletSizes(Ranged):
    r"""Quantity skew: sizes drawn from a Dirichlet distribution, examples at random.

    Each client has ``min_examples``; of the others, client c of C gets the share :math:`p_c`, where
    :math:`p \sim \mathrm{Dir}_C(\alpha)`.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> skewed = fl.DirichletSizes(num_clients=4, alpha=0.5, min_examples=5)
        >>> sizes = np.diff(skewed.split(np.zeros(100), seed=fl.Seed(0)).offsets)
        >>> int(sizes.sum()), bool(sizes.min() >= 5)
        (100, True)

    References:
        Li et al., 2022, `Federated Learning on Non-IID Data Silos
        <https://arxiv.org/abs/2102.02079>`_ (quantity skew; their draw is repeated until the
        smallest client is large enough).
    """

    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")]
    alpha: Annotated[Positive, doc("Concentration, > 0: 0.1 is strong skew, 100 nearly none.")]
    min_examples: Annotated[Count, doc("Examples that each client has at least, >= 1.")]

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:
        """Divide the examples at random into parts of skewed sizes.

        Raises:
            DataError: There are fewer than ``min_examples`` for each client.
        """
        rng = seed.derive("dirichlet sizes").numpy()
        shares_C = rng.dirichlet(np.full(self.num_clients, self.alpha))
        return _deal_by_shares(len(labels), shares_C, min_examples=self.min_examples, rng=rng)


@explain_calls
@dataclass(frozen=True)
class LognormalSizes(Ranged):
    """Quantity skew: sizes in proportion to lognormal draws, examples at random.

    Each client has ``min_examples``; the others are divided in proportion to ``exp(sigma * z)``,
    with one standard normal z per client.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> skewed = fl.LognormalSizes(num_clients=4, sigma=1.0, min_examples=5)
        >>> sizes = np.diff(skewed.split(np.zeros(100), seed=fl.Seed(0)).offsets)
        >>> int(sizes.sum()), bool(sizes.min() >= 5)
        (100, True)
    """

    num_clients: Annotated[Count, doc("Clients in the population, >= 1.")]
    sigma: Annotated[NotNegative, doc("Spread of the sizes' logarithms, >= 0: 0 is equal sizes.")]
    min_examples: Annotated[Count, doc("Examples that each client has at least, >= 1.")]

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:
        """Divide the examples at random into parts of skewed sizes.

        Raises:
            DataError: There are fewer than ``min_examples`` for each client.
        """
        rng = seed.derive("lognormal sizes").numpy()
        logs_C = self.sigma * rng.standard_normal(self.num_clients)
        weights_C = np.exp(logs_C - logs_C.max())  # a large sigma must not overflow
        shares_C = weights_C / weights_C.sum()
        return _deal_by_shares(len(labels), shares_C, min_examples=self.min_examples, rng=rng)


def _deal_by_shares(
    num_examples: int,
    shares_C: NDArray[np.float64],
    *,
    min_examples: int,
    rng: np.random.Generator,
) -> Partition:
    """Shuffle the examples and give each client ``min_examples``, and its share of the others."""
    num_clients = len(shares_C)
    needed = num_clients * min_examples
    what = f"{num_clients} clients with {min_examples} each"
    _require_enough(num_examples, needed=needed, what=what)
    cuts_C = np.rint(np.cumsum(shares_C) * (num_examples - needed)).astype(np.int64)
    cuts_C[-1] = num_examples - needed  # the shares sum to 1 only up to rounding
    sizes_C = np.diff(cuts_C, prepend=0) + min_examples
    owners = np.empty(num_examples, np.int64)
    owners[rng.permutation(num_examples)] = np.repeat(np.arange(num_clients), sizes_C)
    return Partition.of_owners(owners, num_clients=num_clients)


@dataclass(frozen=True, eq=False)
class ByIds:
    """Natural clients: one per distinct id (a writer, a user, a hospital), in ascending order.

    Attributes:
        ids: The client of each example, integers or strings: [N]; see :func:`require_ids`.

    Example:
        >>> natural = ByIds(np.array(["zoe", "ada", "zoe"])).split(np.zeros(3), seed=Seed(0))
        >>> natural.names, natural.rows_of(1)
        (array(['ada', 'zoe'], dtype='<U3'), array([0, 2]))
    """

    ids: ArrayLike

    def split(self, labels: NDArray[Any], *, seed: Seed) -> Partition:  # noqa: ARG002  nothing is drawn
        """Group the examples by id; the seed is not used.

        Raises:
            DataError: The ids are not one integer or string per example, or there are none.
        """
        ids = require_ids(self.ids, num_examples=len(labels))
        names, owners = number_ids(ids)
        return Partition.of_owners(owners, num_clients=names.size, names=names)


def require_ids(ids: ArrayLike, *, num_examples: int) -> NDArray[Any]:
    """Check client ids; return an array of integers, or of strings or objects: shape [N].

    They may be a column of numpy, pandas, pyarrow or Python; a categorical column counts by its
    values.

    Args:
        ids: The client of each example, all integers or all strings: [N].
        num_examples: N.

    Raises:
        DataError: There is not one id per example, an id is missing, or they are of another type.

    Example:
        >>> require_ids(["zoe", "ada"], num_examples=2)
        array(['zoe', 'ada'], dtype=object)
    """
    if isinstance(ids, np.ma.MaskedArray) and np.ma.is_masked(ids):
        row = int(np.flatnonzero(np.ma.getmaskarray(ids))[0])
        raise DataError(f"row {row} has no client id: {_MISSING_ID}")
    is_list = isinstance(ids, list | tuple)  # numpy would make texts of [1, "a"]
    array = np.asarray(ids, dtype=object if is_list else None)
    if array.shape != (num_examples,) or not num_examples:
        raise DataError(
            f"client ids of shape {array.shape} for {num_examples} examples; give one id per "
            "example"
        )
    if array.dtype.kind in "iuSU":
        return array
    values = array.astype(object)
    listed = values.tolist()
    kinds = {_kind_of_id(kind) for kind in set(map(type, listed))}
    if kinds == {"integer"}:
        # Integers of more than 64 bits become Python objects or floats here; they are refused
        # below.
        numbers = np.asarray(listed)
        if numbers.dtype.kind in "iu":
            return numbers
    elif len(kinds) == 1 and kinds <= {"text", "bytes"}:
        return values
    raise DataError(_refusal_of_ids(listed))


def number_ids(ids: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Number the ids: return the distinct ones in ascending order, and each id's index in them.

    Args:
        ids: As :func:`require_ids` returns them: shape [N].
    """
    if ids.dtype.kind != "O":
        names, owners = np.unique(ids, return_inverse=True)
        return names, owners
    listed = ids.tolist()
    # Sort the distinct ids only: np.unique would sort all N Python objects.
    distinct = sorted(set(listed))
    numbers = {name: number for number, name in enumerate(distinct)}
    owners = np.fromiter(map(numbers.__getitem__, listed), np.int64, len(listed))
    return np.asarray(distinct), owners


_MISSING_ID = "each row needs an integer or a string; fill in such rows, or drop them"


def _kind_of_id(kind: type) -> str | None:
    """Return the kind of ids of this type; ``None`` if they cannot be ids."""
    if issubclass(kind, str):
        return "text"
    if issubclass(kind, bytes):
        return "bytes"
    is_integer = issubclass(kind, int | np.integer) and not issubclass(kind, bool)
    return "integer" if is_integer else None


def _refusal_of_ids(ids: Sequence[object]) -> str:
    """Build the error message for bad ids: about the first missing one, else the first wrong one.

    A missing value is ``None``, NaN, or pandas's ``NA`` or ``NaT``.
    """
    for row, each in enumerate(ids):
        # By the type's name, since pandas is not a dependency.
        if each is None or type(each).__name__ in ("NAType", "NaTType") or _is_nan(each):
            return f"row {row} has no client id ({each}): {_MISSING_ID}"
    remedy = "give integers or strings, such as `[str(each) for each in ids]`"
    first = _kind_of_id(type(ids[0]))
    for row, each in enumerate(ids):
        kind = _kind_of_id(type(each))
        if kind is None:
            return f"the client id of row {row} is {each!r}, a {type(each).__name__}; {remedy}"
        if kind != first:
            return (
                f"the client id of row 0 is {ids[0]!r}, of row {row} {each!r}: {first} and "
                f"{kind}; make them the same type, as with `[str(each) for each in ids]`"
            )
    return f"client ids are integers of more than 64 bits; {remedy}"


def _is_nan(value: object) -> bool:
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _require_enough(num_examples: int, *, needed: int, what: str) -> None:
    if num_examples < needed:
        raise DataError(
            f"{num_examples} examples are too few for {what}; lower `num_clients` or add data"
        )


def _require_classes(labels: NDArray[Any]) -> None:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"splitting by label needs one class number per example, not {labels.dtype} of shape "
            f"{labels.shape}; use `Iid` or `ByIds`"
        )
