"""Image folders: clients and labels by folder, sizes, gray images, and files that are no image."""

from pathlib import Path

import numpy as np
import pytest

import fedlearn as fl
from fedlearn.core.features import require_single_input
from fedlearn.errors import DataError

Image = pytest.importorskip("PIL.Image")


def _save(folder: Path, *places: str, color: int = 7, size: tuple[int, int] = (4, 3)) -> None:
    for place in places:
        path = folder / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", size, color).save(path)


def test_folders_are_clients_and_labels(tmp_path: Path) -> None:
    train, test = tmp_path / "train", tmp_path / "test"
    _save(train, "zoe/dog/1", "Köln, <b>/cat/1", "Köln, <b>/dog/1", color=9)
    _save(test, "emu/1", "dog/1")
    data = fl.from_images(train, test=test, seed=0)
    assert data.names is not None
    assert data.names.tolist() == ["Köln, <b>", "zoe"]
    assert data.class_names == ("cat", "dog", "emu")
    features, labels = data.population.load(np.asarray([0])).gather()
    pixels = require_single_input(features)
    assert pixels.shape == (2, 1, 3, 4)
    assert bool((pixels == 9).all())
    assert labels.tolist() == [0, 1]
    assert data.test.labels.tolist() == [1, 2]


def test_one_tree_of_labels_is_divided_by_a_partition(tmp_path: Path) -> None:
    _save(tmp_path, *(f"{label}/{number}" for label in ("cat", "dog") for number in range(4)))
    Image.new("RGB", (4, 3), (1, 2, 3)).save(tmp_path / "dog" / "9.jpg")
    data = fl.from_images(tmp_path, test=0.25, partition=fl.Iid(2), seed=0)
    assert data.population.num_clients == 2
    assert data.feature_shape == (3, 3, 4)
    with pytest.raises(DataError, match=r"not at client/label/file\.png; .* give a partition"):
        fl.from_images(tmp_path, test=0.25, seed=0)


def test_images_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no image in"):
        fl.from_images(tmp_path, test=0.5, seed=0)
    _save(tmp_path, "a/cat/1", "b/cat/1")
    _save(tmp_path, "b/dog/1", size=(5, 3))
    with pytest.raises(DataError, match=r"b/dog/1\.png has 5 x 3 pixels, .*1\.png 4 x 3; crop"):
        fl.from_images(tmp_path, test=0.5, seed=0)
    (tmp_path / "b" / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1\.png cannot be read as an image"):
        fl.from_images(tmp_path, test=0.5, seed=0)
