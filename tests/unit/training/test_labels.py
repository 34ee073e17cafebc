"""Text labels of a client, by the classes that all clients agree on."""

from typing import Any

import pytest

from fedlearn.client import number_labels
from fedlearn.errors import DataError


def test_the_numbers_are_those_of_the_setting_and_not_of_what_a_client_has() -> None:
    names = ("benign", "malignant", "normal")
    assert number_labels(["normal", "malignant"], class_names=names).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("labels", "class_names", "message"),
    [
        (["no", "yess"], ["no", "yes"], "row 1 has the label 'yess', .* did you mean 'yes'"),
        (["no", None], ["no", "yes"], "row 1 has the label None, which is no class"),
        (["no"], ["no", "no"], "class_names has 'no' twice"),
        (["n"], "no", "class_names is 'no'; give a list"),
    ],
)
def test_labels_that_are_no_class_are_refused(
    labels: Any,  # Any: also of wrong types
    class_names: Any,  # Any: likewise
    message: str,
) -> None:
    with pytest.raises(DataError, match=message):
        number_labels(labels, class_names=class_names)
