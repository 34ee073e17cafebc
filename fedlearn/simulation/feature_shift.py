"""Feature shift: the same kind of examples, which look different at each client.

Each shift is a frozen dataclass. Its method ``fit`` checks that the data can be shifted and returns
the shift of each client, which depends on the seed, the client and the example's place alone, so
that it is the same in every executor, session and worker, and in every round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import numpy as np
import torch
from annotated_types import MinLen, doc
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedlearn.core.calls import explain_calls
from fedlearn.core.features import rebuild_inputs, require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import NotNegative, Positive, Ranged
from fedlearn.errors import DataError
from fedlearn.simulation.population import (
    ArrayPopulation,
    BootstrapPopulation,
    ClientRows,
    MapDataset,
    Population,
    PopulationWrapper,
    UnreadRows,
    unread_rows,
)
from fedlearn.simulation.sources import Examples
from fedlearn.training.local_data import Pair, read_pairs

# Bounds the memory of examples that are shifted at a time.
_EXAMPLES_AT_ONCE = 1 << 14
#: Integers that hold measured values, such as pixels; larger ones number words or categories.
_MEASURED = (torch.uint8, torch.int8, torch.int16, torch.uint16)
_RIGHT_ANGLE = 90.0


class ClientShift(Protocol):
    """The shift of each client of a population."""

    def apply(
        self, values: Tensor, *, owners: NDArray[np.int64], places: NDArray[np.int64]
    ) -> Tensor:
        """Return shifted values, of the same shape and dtype.

        Args:
            values: Features of n examples: ``[n, *F]``.
            owners: The client of each: [n].
            places: The place of each among its client's examples; -1, -2, ... for those that the
                client is only tested on: [n].
        """

    def describe(self, client_id: int) -> str:
        """Describe the shift of one client in a few words."""


class FeatureShift(Protocol):
    """How the features of clients differ."""

    def fit(self, test: Examples, *, num_clients: int, seed: Seed) -> ClientShift:
        """Return the shift of each client.

        Args:
            test: The central test set, which has the kind of the clients' examples.
            num_clients: Number of clients.
            seed: Seed of all that is random.

        Raises:
            DataError: Such examples cannot be shifted.
        """


@explain_calls
@dataclass(frozen=True)
class RotationShift(Ranged):
    """Each client's images are rotated by one of a few angles.

    Height and width are the last two dimensions. The seed deals the angles, each to as many clients
    as another, up to one. Square images are rotated by a multiple of 90 degrees exactly; otherwise
    values are interpolated, and those from outside of the image are 0.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> x, y = np.random.rand(40, 1, 8, 8), np.arange(40) % 2
        >>> data = fl.from_arrays(x, y, partition=fl.Iid(4), test_fraction=0.2, seed=0)
        >>> rotated = data.with_feature_shift(fl.RotationShift((0, 90, 180, 270)), seed=0)
        >>> sorted(rotated.shift.describe(each) for each in range(4))
        ['rotated by 0°', 'rotated by 180°', 'rotated by 270°', 'rotated by 90°']

    References:
        Ghosh et al., 2020, `An Efficient Framework for Clustered Federated Learning
        <https://arxiv.org/abs/2006.04088>`_, section 6 (rotated MNIST and CIFAR).
    """

    angles: Annotated[
        tuple[float, ...], MinLen(1), doc("Angles in degrees, counterclockwise; at least one.")
    ]
    image_shape: Annotated[
        tuple[int, int] | None,
        doc("Height and width of images that are stored as flat rows; without it, as they are."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_shape is not None and min(self.image_shape) < 1:
            raise ValueError(f"image_shape is {self.image_shape!r}; give a height and width >= 1")
        if not self.angles or not all(map(math.isfinite, self.angles)):
            raise ValueError(
                f"angles is {self.angles!r}; give at least one finite number of degrees"
            )

    def fit(self, test: Examples, *, num_clients: int, seed: Seed) -> ClientShift:  # noqa: ARG002 - any number
        """Return the rotation of each client; raises DataError if examples are no images."""
        shape = tuple(_require_shiftable(test, self).shape[1:])
        if test.labels.dim() > 1:
            raise DataError(
                f"RotationShift: labels of shape {tuple(test.labels.shape[1:])} per example may "
                "belong to places of the image, which would move; use one label per image"
            )
        if self.image_shape is None and len(shape) < 2:  # noqa: PLR2004 - height and width
            raise DataError(
                f"RotationShift: examples have shape {shape}, without height and width; give "
                "image_shape=(height, width) for images that are stored as flat rows"
            )
        if self.image_shape is not None and math.prod(shape) % math.prod(self.image_shape):
            raise DataError(
                f"RotationShift: image_shape is {self.image_shape}, which is "
                f"{math.prod(self.image_shape)} values, but an example has {math.prod(shape)}; "
                "correct it, or leave it out for images that have height and width"
            )
        return _Rotations(self, seed)


@explain_calls
@dataclass(frozen=True)
class NoiseShift(Ranged):
    """Each client's features have Gaussian noise, from none at the first to most at the last.

    Client i of N adds noise with standard deviation ``std * i / (N - 1)``. An example has the
    same noise in every round. Integers of at most 16 bits, such as pixels, are rounded and stay in
    the range of their dtype.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> x, y = np.random.rand(40, 3), np.arange(40) % 2
        >>> data = fl.from_arrays(x, y, partition=fl.Iid(3), test_fraction=0.2, seed=0)
        >>> noisy = data.with_feature_shift(fl.NoiseShift(std=0.2), seed=0)
        >>> [noisy.shift.describe(each) for each in range(3)]
        ['noise 0', 'noise 0.1', 'noise 0.2']

    References:
        Li et al., 2022, `Federated Learning on Non-IID Data Silos
        <https://arxiv.org/abs/2102.02079>`_ (noise-based feature imbalance; the standard deviation
        is that of their code, while the paper gives it as a variance).
    """

    std: Annotated[
        Positive, doc("Standard deviation of the last client's noise, in units of the features.")
    ]

    def fit(self, test: Examples, *, num_clients: int, seed: Seed) -> ClientShift:
        """Return the noise of each client; raises DataError if features are no measurements."""
        _require_measured(_require_shiftable(test, self), self)
        return _Noises(self, num_clients, seed)


@explain_calls
@dataclass(frozen=True)
class AffineShift(Ranged):
    """Each client's columns are scaled and shifted, as by instruments with other calibrations.

    A column x becomes ``x * exp(scale * u) + offset * sd * v``, where u and v are standard normal
    for each client and column, and sd is the column's standard deviation in the central test set.
    The columns are the first dimension of an example: of an image [C, H, W] the channels. Integers
    of at most 16 bits are rounded and stay in the range of their dtype.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> x, y = np.arange(80.0).reshape(40, 2), np.arange(40) % 2
        >>> data = fl.from_arrays(x, y, partition=fl.Iid(4), test=(x, y), seed=0)
        >>> shifted = data.with_feature_shift(fl.AffineShift(scale=0.1, offset=0.5), seed=0)
        >>> shifted.shift.describe(0)
        'scaled by 0.898 to 1.06, shifted by -14.9 to -12.8'
    """

    scale: Annotated[NotNegative, doc("Spread of the logarithm of the factors, >= 0.")]
    offset: Annotated[
        NotNegative, doc("Spread of the offsets, in standard deviations of the column, >= 0.")
    ]

    def fit(self, test: Examples, *, num_clients: int, seed: Seed) -> ClientShift:  # noqa: ARG002 - any number
        """Return the scales and offsets of each client; raises DataError as the others do."""
        values = _require_shiftable(test, self)
        _require_measured(values, self)
        if values.dim() < 2:  # noqa: PLR2004 - examples and columns
            raise DataError("AffineShift: examples have no columns; give features of shape [N, F]")
        spreads = values.double().transpose(0, 1).flatten(1).std(1, correction=0)
        return _Affine(self, spreads.numpy(), seed)


@dataclass(frozen=True)
class _Rotations:
    rule: RotationShift
    seed: Seed

    def apply(
        self, values: Tensor, *, owners: NDArray[np.int64], places: NDArray[np.int64]
    ) -> Tensor:
        del places  # a client's examples are all rotated alike
        shape = values.shape
        height, width = self.rule.image_shape or shape[-2:]
        images = values.reshape(len(values), -1, height, width)
        rotated, chosen = torch.empty_like(images), self._choose(owners)
        for number, angle in enumerate(self.rule.angles):
            own = torch.from_numpy(np.flatnonzero(chosen == number))
            if len(own):  # torch makes no grid for no images
                rotated[own] = _rotate(images[own], angle)
        return rotated.reshape(shape)

    def describe(self, client_id: int) -> str:
        number = int(self._choose(np.asarray([client_id]))[0])
        return f"rotated by {self.rule.angles[number]:g}°"

    def _choose(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each client's angle.

        With n angles, each n clients in a row have all of them, in random order.
        """
        num_angles = len(self.rule.angles)
        blocks, at = np.unique(client_ids // num_angles, return_inverse=True)
        keys = self.seed.derive("rotation").hash(blocks[:, None], np.arange(num_angles))
        order = np.argsort(keys, axis=1, kind="stable")
        chosen: NDArray[np.int64] = order[at, client_ids % num_angles]
        return chosen


def _rotate(images: Tensor, angle: float) -> Tensor:
    """Rotate images [n, C, H, W] counterclockwise by an angle in degrees."""
    height, width = images.shape[-2:]
    turns, rest = divmod(angle, _RIGHT_ANGLE)
    if not rest and (height == width or turns % 2 == 0):
        return torch.rot90(images, int(turns), (-2, -1))
    radians = math.radians(angle)
    cosine, sine = math.cos(radians), math.sin(radians)
    # Maps places in the result to places in the image. Both are in units of half a side, so the
    # ratio of the sides keeps angles right.
    rows = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    floats = images.to(torch.promote_types(images.dtype, torch.float32))
    theta = torch.tensor(rows, dtype=floats.dtype).expand(len(images), 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return _restore(grid_sample(floats, grid, align_corners=False), images.dtype)


@dataclass(frozen=True)
class _Noises:
    rule: NoiseShift
    num_clients: int
    seed: Seed

    def apply(
        self, values: Tensor, *, owners: NDArray[np.int64], places: NDArray[np.int64]
    ) -> Tensor:
        shifted, generator = values.clone(), torch.Generator()
        stds, keys = self._stds(owners), self.seed.derive("noise").hash(owners, places) >> 1
        each = zip(stds.tolist(), keys.tolist(), strict=True)
        for row, (std, key) in enumerate(each):
            if std > 0.0:  # the first client's examples stay as they are
                generator.manual_seed(key)
                noise = std * torch.randn(values.shape[1:], generator=generator)
                noisy = values[row].to(torch.promote_types(values.dtype, torch.float32)) + noise
                shifted[row] = _restore(noisy, values.dtype)
        return shifted

    def describe(self, client_id: int) -> str:
        return f"noise {float(self._stds(np.asarray([client_id]))[0]):.4g}"

    def _stds(self, client_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        stds: NDArray[np.float64] = self.rule.std * client_ids / max(1, self.num_clients - 1)
        return stds


@dataclass(frozen=True, eq=False)
class _Affine:
    rule: AffineShift
    spreads_F: NDArray[np.float64]
    seed: Seed

    def apply(
        self, values: Tensor, *, owners: NDArray[np.int64], places: NDArray[np.int64]
    ) -> Tensor:
        del places  # a client's examples are all shifted alike
        clients, at = np.unique(owners, return_inverse=True)
        factors, offsets = (
            torch.from_numpy(each[at]).reshape(*each[at].shape, *[1] * (values.dim() - 2))
            for each in self._draw(clients)
        )
        return _restore(values.double() * factors + offsets, values.dtype)

    def describe(self, client_id: int) -> str:
        factors, offsets = (each[0] for each in self._draw(np.asarray([client_id])))
        return (
            f"scaled by {factors.min():.3g} to {factors.max():.3g}, "
            f"shifted by {offsets.min():.3g} to {offsets.max():.3g}"
        )

    def _draw(
        self, client_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Draw the factors and the offsets of these clients' columns: [n, F] each."""
        columns, ids = np.arange(len(self.spreads_F)), client_ids[:, None]
        factors = np.exp(self.rule.scale * self.seed.derive("scale").normal(ids, columns))
        offsets = self.rule.offset * self.seed.derive("offset").normal(ids, columns)
        return factors, offsets * self.spreads_F


def _restore(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert shifted values back; integers are rounded and stay in their range."""
    if dtype.is_floating_point:
        return values.to(dtype)
    limits = torch.iinfo(dtype)
    return values.round().clamp(limits.min, limits.max).to(dtype)


def _require_shiftable(test: Examples, shift: FeatureShift) -> Tensor:
    if not isinstance(test.features, Tensor):
        raise DataError(
            f"{type(shift).__name__} shifts examples of one input, but these have several; shift "
            "them where you make them, or leave the shift out"
        )
    return require_single_input(test.features)


def _require_measured(values: Tensor, shift: FeatureShift) -> None:
    if not values.is_floating_point() and values.dtype not in _MEASURED:
        raise DataError(
            f"{type(shift).__name__}: features are {values.dtype}, which number words or "
            "categories; convert measurements to floats, or leave the shift out"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ShiftedPopulation(PopulationWrapper):
    """Clients whose features are shifted when they are loaded.

    Attributes:
        whole: The clients with their features as they are.
        shift: The shift of each client.
        is_test: Whether the clients are only tested on these examples.
    """

    shift: ClientShift
    is_test: bool

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return self.whole.num_examples(client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the shifted examples of these clients, in this order.

        Raises:
            DataError: An example that was just read is invalid.
        """
        rows = self.whole.load(client_ids)
        features, labels = rows.gather()
        owners, places = _number(client_ids, np.diff(rows.offsets), is_test=self.is_test)
        values = _apply(self.shift, require_single_input(features), owners, places)
        features = rebuild_inputs([values], like=features)
        return ClientRows(features, labels, np.arange(len(labels)), rows.offsets)

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows | None:
        """Return these clients' rows without reading them; ``None`` if no dataset reads them."""
        rows = unread_rows(self.whole, client_ids)
        if rows is None:
            return None
        owners, places = _number(client_ids, np.diff(rows.offsets), is_test=self.is_test)
        at = {row: place for place, row in enumerate(rows.rows.tolist())}
        return replace(rows, dataset=_ShiftedDataset(rows.dataset, self.shift, at, owners, places))


@dataclass(frozen=True, eq=False)
class _ShiftedDataset:
    """Rows of a dataset, shifted when they are read.

    Attributes:
        dataset: The dataset.
        shift: The shift of each client.
        at: For each row, its index in ``owners`` and ``places``.
        owners: The client of each row.
        places: The place of each row among its client's.
    """

    dataset: MapDataset
    shift: ClientShift
    at: dict[int, int]
    owners: NDArray[np.int64]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Pair:
        (pair,) = self.__getitems__([index])
        return pair

    def __getitems__(self, indices: Sequence[int]) -> list[Pair]:
        pairs = read_pairs(self.dataset, rows=np.asarray(indices))
        return [self._shift(pair, row) for pair, row in zip(pairs, indices, strict=True)]

    def _shift(self, pair: Pair, row: int) -> Pair:
        features, label = pair
        at = [self.at[row]]
        values = require_single_input(features)[None]
        shifted = _apply(self.shift, values, self.owners[at], self.places[at])
        return rebuild_inputs([shifted[0]], like=features), label


def _apply(
    shift: ClientShift, values: Tensor, owners: NDArray[np.int64], places: NDArray[np.int64]
) -> Tensor:
    """Return shifted values, of the same shape and dtype."""
    if values.dtype != torch.uint16:
        return shift.apply(values, owners=owners, places=places)
    # torch can do little with 16 bits without a sign.
    return _restore(shift.apply(values.int(), owners=owners, places=places), values.dtype)


def _number(
    client_ids: NDArray[np.int64], sizes: NDArray[np.int64], *, is_test: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the client of each example, and its place among its client's."""
    owners, starts = np.repeat(client_ids, sizes), np.repeat(np.cumsum(sizes) - sizes, sizes)
    places = np.arange(len(owners)) - starts
    return owners, -1 - places if is_test else places


def shift_population(population: Population, shift: ClientShift, *, is_test: bool) -> Population:
    """Return the clients with shifted features; those in memory are shifted at once, in a copy."""
    if not isinstance(population, ArrayPopulation):
        return ShiftedPopulation(whole=population, shift=shift, is_test=is_test)
    features = require_single_input(population.features).clone()
    array = features.numpy()  # shares memory, and can index every dtype
    partition = population.partition
    owners, places = _number(
        np.arange(population.num_clients), np.diff(partition.offsets), is_test=is_test
    )
    for start in range(0, len(owners), _EXAMPLES_AT_ONCE):
        some = slice(start, start + _EXAMPLES_AT_ONCE)
        values = torch.from_numpy(array[partition.rows[some]])
        shifted = _apply(shift, values, owners[some], places[some])
        array[partition.rows[some]] = shifted.numpy()
    return replace(population, features=features)


def find_common_examples(population: Population) -> BootstrapPopulation | None:
    """Return the clients that draw theirs from common examples; ``None`` if each has its own."""
    whole = population.whole if isinstance(population, ShiftedPopulation) else population
    return whole if isinstance(whole, BootstrapPopulation) else None
