"""Federated data sets from folders of image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.calls import explain_calls
from fedlearn.errors import DataError
from fedlearn.simulation.federated_data import (
    Division,
    FederatedData,
    Natural,
    divide_examples,
)
from fedlearn.simulation.sources import Examples, number_texts

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")


@explain_calls
def from_images(
    path: Path | str,
    *,
    test: float | Path | str | None = None,
    seed: int,
    partition: Division | None = None,
) -> FederatedData:
    """Build a federated data set from image files: ``path/client/label/file.png``.

    Images are kept in memory as uint8 [3, height, width], or [1, height, width] if all are gray;
    all must have the same size. The names of the folders are those of clients and classes.

    Args:
        path: The folder. With a ``partition``, it has no clients: ``path/label/file.png``.
        test: The share of all images to hold out for the central test, in (0, 1); or a folder
            with ``label/file.png``.
        seed: Chooses the test images and the partition.
        partition: How images are divided among clients; ``None``: each folder in ``path`` is one.

    Raises:
        ValueError: The share to hold out is not in (0, 1).
        DataError: Pillow is not installed, there is no image, one cannot be read or has another
            size, or the division is impossible.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> import fedlearn as fl
        >>> with TemporaryDirectory() as folder:
        ...     for place in ("aachen/cat/1", "aachen/dog/1", "berlin/dog/1", "berlin/dog/2"):
        ...         Path(folder, place).parent.mkdir(parents=True, exist_ok=True)
        ...         Image.new("RGB", (8, 6)).save(Path(folder, f"{place}.png"))
        ...     data = fl.from_images(folder, test=0.25, seed=0)
        >>> data.names, data.class_names, data.feature_shape
        (array(['aachen', 'berlin'], dtype='<U6'), ('cat', 'dog'), (3, 6, 8))
    """
    is_natural = partition is None or isinstance(partition, Natural)
    train = _find(Path(path), has_clients=is_natural)
    tests = _find(Path(test), has_clients=False) if isinstance(test, str | Path) else None
    parts = [train] if tests is None else [train, tests]
    class_names, labels = number_texts([np.asarray(part.labels) for part in parts])
    pixels = _read([path for part in parts for path in part.paths])
    sizes = [len(part.paths) for part in parts]
    made = [
        Examples(
            features=features,
            labels=torch.from_numpy(numbers),
            groups=np.asarray(part.clients) if part is train and is_natural else None,
            num_classes=len(class_names),
            class_names=class_names,
        )
        for part, features, numbers in zip(parts, pixels.split(sizes), labels, strict=True)
    ]
    held_out = made[1] if isinstance(test, str | Path) else test
    return divide_examples(made[0], held_out, partition=partition or Natural(), seed=seed)


@dataclass(frozen=True)
class _Found:
    """Image files, with the folders that they are in."""

    paths: Sequence[Path]
    clients: Sequence[str]
    labels: Sequence[str]


def _find(path: Path, *, has_clients: bool) -> _Found:
    """Find the images at the right depth; raise DataError if there are none, or some elsewhere."""
    if not path.is_dir():
        raise DataError(f"there is no folder {path}; correct the path")
    form = "client/label/file.png" if has_clients else "label/file.png"
    depth = form.count("/") + 1
    files = sorted(
        each.relative_to(path)
        for each in path.rglob("*")
        if each.suffix.lower() in _SUFFIXES and not each.name.startswith(".")
    )
    if not files:
        raise DataError(f"there is no image in {path}; put images there as {form}")
    for each in files:
        if len(each.parts) != depth:
            raise DataError(
                f"{each} in {path} is not at {form}; move it, or "
                + ("give a partition if folders are labels" if has_clients else "leave it out")
            )
    return _Found(
        [path / each for each in files],
        [each.parts[0] for each in files],
        [each.parts[-2] for each in files],
    )


def _read(paths: Sequence[Path]) -> Tensor:
    """Read images into uint8 [N, channels, height, width]."""
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise DataError(
            'fl.from_images needs Pillow; install it: pip install "fedlearn[images]"'
        ) from error
    images = list[NDArray[np.uint8]]()
    for path in paths:
        try:
            with Image.open(path) as image:
                is_gray = image.mode in ("L", "1")
                images.append(np.asarray(image.convert("L" if is_gray else "RGB")))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise DataError(
                f"{path} cannot be read as an image: {error}; save it again, or leave it out"
            ) from error
        if images[-1].shape[:2] != images[0].shape[:2]:
            (height, width), (first_height, first_width) = (
                each.shape[:2] for each in (images[-1], images[0])
            )
            raise DataError(
                f"{path} has {width} x {height} pixels, {paths[0]} {first_width} x {first_height}; "
                "crop or resize images to one size"
            )
    if all(each.ndim == 2 for each in images):  # noqa: PLR2004 (gray)
        return torch.from_numpy(np.stack(images))[:, None]
    colored = [each if each.ndim > 2 else np.repeat(each[..., None], 3, 2) for each in images]  # noqa: PLR2004
    return torch.from_numpy(np.stack(colored)).permute(0, 3, 1, 2).contiguous()
