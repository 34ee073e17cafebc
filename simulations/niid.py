"""Data, partitions and networks of NIID-Bench, for ``niid_mnist`` and ``niid_cifar10``.

The data are read from the directory ``FEDLEARN_DATA_DIR``, else ``../shared/data`` next to the
project. Partitions draw as the published baseline does: with the same seed and the same order of
labels, clients have the same examples.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedlearn as fl
from fedlearn.simulation.partition import Partition, Partitioner

_DATA_DIR = Path(__file__).resolve().parents[2] / "shared" / "data"
#: Fewest examples of a client; the Dirichlet's proportions are drawn again until all have them.
_MIN_EXAMPLES = 10
_NUM_CLASSES = 10
#: Pixels by which a random crop of CIFAR-10 may be off the center.
_MARGIN = 4


@dataclass(frozen=True, kw_only=True)
class CappedDirichlet:
    """Divides each class in proportions from a Dirichlet distribution, among clients with room.

    In contrast to ``fl.Dirichlet``, a client that has its equal share of all examples already gets
    none of the next classes, so that sizes differ less.
    """

    num_clients: int
    alpha: float
    draws: int

    def split(
        self,
        labels: NDArray[np.int64],
        *,
        seed: fl.Seed,
    ) -> Partition:
        """Assign each row to a client, by the seed ``draws`` alone, as the baseline does."""
        rng, fewest = np.random.default_rng(self.draws), 0
        owners = np.empty(len(labels), np.int64)
        while fewest < _MIN_EXAMPLES:
            sizes_C = np.zeros(self.num_clients, np.int64)
            for rows in _iter_classes(labels, rng):
                shares_C = rng.dirichlet(np.full(self.num_clients, self.alpha))
                shares_C *= sizes_C < len(labels) / self.num_clients
                cuts = (np.cumsum(shares_C / shares_C.sum()) * len(rows)).astype(np.int64)[:-1]
                owners[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
                sizes_C += np.bincount(owners[rows], minlength=self.num_clients)
            fewest = int(sizes_C.min())
        return Partition.of_owners(owners, num_clients=self.num_clients)


@dataclass(frozen=True, kw_only=True)
class FewLabels:
    """Gives each client a few labels, and deals each class equally to the clients that have it."""

    rule: fl.FewClasses
    draws: int

    def split(
        self,
        labels: NDArray[np.int64],
        *,
        seed: fl.Seed,
    ) -> Partition:
        """Assign each row to a client, by the seed ``draws`` alone, as the baseline does."""
        return self.rule.draw(labels, rng=np.random.default_rng(self.draws))


def _iter_classes(
    labels: NDArray[np.int64], rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each class, shuffled."""
    for label in range(_NUM_CLASSES):
        rows = np.flatnonzero(labels == label)
        rng.shuffle(rows)
        yield rows


PARTITIONS: Mapping[str, Callable[[int], Partitioner]] = {
    "dirichlet": lambda draws: CappedDirichlet(num_clients=10, alpha=0.5, draws=draws),
    "two labels": lambda draws: FewLabels(
        rule=fl.FewClasses(num_clients=10, classes_per_client=2), draws=draws
    ),
}


def load_mnist(*, partition: str, seed: int, every: int = 1) -> fl.FederatedData:
    """Load ``mnist.npz``, divided among 10 clients.

    Args:
        partition: ``"dirichlet"`` or ``"two labels"``.
        seed: Of the partition's draws.
        every: Take only each example whose index is a multiple of it, for a quick try.
    """
    with np.load(_find("mnist.npz")) as arrays:
        x, y, x_test, y_test = (
            arrays[key][::every] for key in ("x_train", "y_train", "x_test", "y_test")
        )
    return _divide(x[:, None], y, (x_test[:, None], y_test), partition=partition, seed=seed)


def load_cifar10(*, partition: str, seed: int, every: int = 1) -> fl.FederatedData:
    """Load ``cifar10_jpeg.npz``, with the arguments of :func:`load_mnist`.

    Training images are cropped and flipped at random, as in the baseline. Decoding all images takes
    about 20 CPU seconds.
    """
    from PIL import Image  # noqa: PLC0415 - not needed for MNIST

    with np.load(_find("cifar10_jpeg.npz")) as arrays:
        header, scan, offset = arrays["header"].tobytes(), arrays["scan"], arrays["offset"]
        y, is_test = arrays["y"][::every], arrays["is_test"][::every]
    x = np.empty((len(y), 3, 32, 32), np.uint8)
    for row, (start, end) in enumerate(list(pairwise(offset))[::every]):
        image = Image.open(io.BytesIO(header + scan[start:end].tobytes()))
        x[row] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    x_test, y_test = torch.from_numpy(_scale(x[is_test])), torch.from_numpy(y[is_test]).long()
    train = CroppedImages(x[~is_test], y[~is_test])
    return fl.from_dataset(
        train,
        labels=y[~is_test].astype(np.int64),
        partition=PARTITIONS[partition](seed),
        test=TensorDataset(x_test, y_test),
        seed=seed,
    )


def _find(name: str) -> Path:
    return Path(os.environ.get("FEDLEARN_DATA_DIR", _DATA_DIR)) / name


def _divide(
    x: NDArray[np.uint8],
    y: NDArray[np.uint8],
    test: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    *,
    partition: str,
    seed: int,
) -> fl.FederatedData:
    rule = PARTITIONS[partition](seed)
    return fl.from_arrays(_scale(x), y, partition=rule, test=(_scale(test[0]), test[1]), seed=seed)


def _scale(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = np.divide(pixels, 255, dtype=np.float32)
    return scaled


class CroppedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels; each read crops an image out of its reflection, and may flip it.

    Args:
        pixels: [N, channels, height, width].
        labels: [N].
    """

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        self._pixels, self._labels = pixels, torch.from_numpy(labels).long()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Read one image, with values in [0, 1], and its label."""
        (pair,) = self.__getitems__([index])
        return pair

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Read a batch at once."""
        rows = np.asarray(indices)
        whole, edge = self._pixels[rows], (_MARGIN, _MARGIN)
        padded = np.pad(whole, ((0, 0), (0, 0), edge, edge), mode="reflect")
        # [B, channels, offsets down, offsets right, height, width], without a copy.
        windows = sliding_window_view(padded, whole.shape[2:], axis=(2, 3))
        down, right = torch.randint(2 * _MARGIN + 1, (2, len(rows))).numpy()
        cropped = windows[np.arange(len(rows)), :, down, right]
        is_flipped = torch.rand(len(rows)).numpy() < 0.5
        cropped[is_flipped] = cropped[is_flipped, :, :, ::-1]
        features = torch.from_numpy(_scale(cropped))
        return list(zip(features, self._labels[rows], strict=True))


class LeNet(nn.Module):
    """The baseline's network: two convolutions of 6 and 16 channels, three linear layers."""

    def __init__(self, *, num_channels: int, num_features: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(num_channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(num_features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        )
        self.head = nn.Linear(84, _NUM_CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of images with values in [0, 1], shape [B, channels, height, width]."""
        scores: Tensor = self.head(self.body(pixels))
        return scores


def make_mnist_model() -> nn.Module:
    """Build the network for MNIST, which has 44,426 parameters."""
    return LeNet(num_channels=1, num_features=16 * 4 * 4)


def make_cifar10_model() -> nn.Module:
    """Build the network for CIFAR-10, which has 62,006 parameters."""
    return LeNet(num_channels=3, num_features=16 * 5 * 5)
