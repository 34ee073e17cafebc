"""Rows of a dataset become pairs of inputs and a label, whatever their form."""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedlearn as fl
from fedlearn.client import TorchTrainer
from fedlearn.core.features import name_inputs
from fedlearn.errors import DataError
from fedlearn.training.local_data import read_rows

NUM_ROWS = 6


class Rows(Dataset[Any]):
    """A dataset whose row ``i`` is computed by a function."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class InBatches(Rows):
    """A dataset that can read several rows at once, as Hugging Face's do."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("rows are read one by one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._make(index) for index in indices]


def image(index: int) -> torch.Tensor:
    return torch.arange(4.0) + index


def read(dataset: Any) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    features, labels = read_rows(dataset, rows=np.array([4, 1]), key=0)
    return name_inputs(features), labels


IMAGES = torch.stack([image(4), image(1)])


@pytest.mark.parametrize(
    "dataset",
    [
        Rows(lambda i: {"img": image(i), "label": i}),
        InBatches(lambda i: {"label": torch.tensor(i), "pixel_values": image(i)}),
        Rows(lambda i: {"x": image(i).tolist(), "y": i}),
        Rows(lambda i: {"image": image(i).numpy(), "target": np.int64(i)}),
        Rows(lambda i: UserDict(features=image(i), labels=i)),
        [{"img": image(i), "targets": i} for i in range(NUM_ROWS)],
        fl.Columns(Rows(lambda i: {"img": image(i), "fine": i, "coarse": 0}), "fine", ("img",)),
        fl.Columns(InBatches(lambda i: {"img": image(i), "class": i}), label="class"),
        fl.Columns(
            Rows(lambda i: {"label": "ignored", "img": image(i), "n": i}), "n", inputs=["img"]
        ),
        Rows(lambda i: (image(i), i)),  # the control: a pair
    ],
)
def test_one_input_of_a_row_of_columns_is_the_models_argument(dataset: Any) -> None:
    inputs, labels = read(dataset)
    assert list(inputs) == ["features"]
    assert torch.equal(inputs["features"], IMAGES)
    assert labels.tolist() == [4, 1]


def test_several_inputs_of_a_row_of_columns_are_keyword_arguments() -> None:
    rows = Rows(lambda i: {"mask": [True, False], "ids": [i, 0], "labels": i, "text": "words"})
    inputs, labels = read(fl.Columns(rows, label="labels", inputs=["ids", "mask"]))
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "input 'ids'": [[4, 0], [1, 0]],
        "input 'mask'": [[True, False], [True, False]],
    }
    assert labels.tolist() == [4, 1]


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Rows(lambda i: {"img": image(i), "fine": i}), r"dataset\[4\].*'img', 'fine'.*fl.Columns"),
        (Rows(lambda i: {"x": image(i), "y": i, "label": i}), "both 'label' and 'y'"),
        (Rows(lambda i: {"label": i}), "'label' alone"),
        (Rows(lambda i: {"img": image(i), "text": "words", "label": i}), "inputs="),
        (fl.Columns(Rows(lambda i: {"img": image(i), "label": i}), "lable"), "no column 'lable'"),
        (fl.Columns(Rows(lambda i: (image(i), i)), "label"), "is a tuple.*leave fl.Columns out"),
    ],
)
def test_a_row_whose_label_cannot_be_told_is_refused_with_its_columns(
    dataset: Any, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        read(dataset)


def test_one_text_is_no_list_of_inputs() -> None:
    with pytest.raises(DataError, match="inputs is 'img'"):
        fl.Columns([], label="label", inputs="img")


def make_model() -> nn.Module:
    return nn.Linear(4, NUM_ROWS)


@pytest.mark.parametrize("test", [None, Rows(lambda i: {"image": image(i), "labels": i})])
def test_a_trainer_and_a_simulation_take_rows_of_columns(test: Rows | None) -> None:
    """Both read them as pairs: the model and the metrics agree."""
    columns, pairs = Rows(lambda i: {"img": image(i), "label": i}), Rows(lambda i: (image(i), i))
    torch.manual_seed(0)
    weights = make_model().state_dict()
    found, expected = (
        TorchTrainer.of(make_model, each, test=test, device="cpu").evaluate(weights)
        for each in (columns, pairs)
    )
    assert found == expected
    data = [
        fl.from_dataset([each, each], partition=fl.Natural(), test=each, seed=0)
        for each in (columns, pairs)
    ]
    assert torch.equal(*(each.test.labels for each in data))
