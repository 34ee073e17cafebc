"""Features that consist of one tensor or of several."""

import pytest
import torch
from torch import Tensor, nn

from fedlearn.core.features import (
    Features,
    call_module,
    list_tensors,
    map_inputs,
    name_inputs,
    rebuild_inputs,
    require_one_label_each,
    slice_rows,
    take_rows,
)
from fedlearn.errors import DataError

IDS, MASK = torch.arange(12).reshape(4, 3), torch.arange(4).float()
FORMS: dict[str, Features] = {
    "tensor": IDS,
    "tuple": (IDS, MASK),
    "dict": {"mask": MASK, "ids": IDS},
}


class Difference(nn.Module):
    """A module whose arguments must not be swapped."""

    def forward(self, ids: Tensor, mask: Tensor | float = 0.0) -> Tensor:
        return ids.sum(1) - mask


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_features_have_their_form(form: str) -> None:
    """Rows and slices apply to every tensor alike."""
    whole = FORMS[form]
    for part, rows in (
        (take_rows(whole, torch.tensor([2, 0])), [2, 0]),
        (slice_rows(whole, slice(1, 3)), [1, 2]),
    ):
        assert type(part) is type(whole)
        assert name_inputs(part).keys() == name_inputs(whole).keys()
        for mine, every in zip(list_tensors(part), list_tensors(whole), strict=True):
            assert torch.equal(mine, every[rows])


def test_a_dict_has_one_order_whatever_it_was_written_in() -> None:
    """Code in one place takes features apart that code in another puts together."""
    other: Features = {"ids": IDS, "mask": MASK}
    assert [id(each) for each in list_tensors(other)] == [id(each) for each in (IDS, MASK)]
    assert [id(each) for each in list_tensors(FORMS["dict"])] == [id(IDS), id(MASK)]
    again = rebuild_inputs(list_tensors(other), like=FORMS["dict"])
    assert isinstance(again, dict)
    assert again["ids"] is IDS
    assert again["mask"] is MASK


def test_a_tuple_is_positional_and_a_dict_by_name() -> None:
    """In the way that ``forward`` declares its arguments."""
    assert torch.equal(call_module(Difference(), IDS), IDS.sum(1))
    for form in ("tuple", "dict"):
        assert torch.equal(call_module(Difference(), FORMS[form]), IDS.sum(1) - MASK)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ((IDS, MASK[:3]), r"input 1 of shape \(3,\) and labels of shape \(4,\)"),
        ({"ids": IDS[:2], "mask": MASK}, r"input 'ids' of shape \(2, 3\) and labels"),
        ((IDS, torch.tensor(1.0)), r"input 1 of shape \(\) and labels"),
        ((), "features are a tuple of"),
        ({}, "features are a dict of"),
        ({0: IDS}, r"features are a dict of \[0\]; .* names that the model's forward"),
        ([IDS, MASK], "features: a list; features are one tensor, or a tuple"),
        ((IDS, [1, 2]), "input 1: a list; features"),
    ],
)
def test_features_that_do_not_fit_are_refused_by_name(features: Features, message: str) -> None:
    """The error names the input and the lengths."""
    with pytest.raises(DataError, match=message):
        require_one_label_each(features, torch.zeros(4))


@pytest.mark.parametrize("form", FORMS)
def test_features_with_one_label_each_are_accepted(form: str) -> None:
    """The control; mapping keeps the lengths."""
    require_one_label_each(map_inputs(lambda tensor: tensor * 2, FORMS[form]), torch.zeros(4))
