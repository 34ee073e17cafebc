"""Numbers the text labels of a client's examples by the classes that all clients agree on."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedlearn.core.words import did_you_mean
from fedlearn.errors import DataError


def number_labels(labels: Iterable[str], *, class_names: Sequence[str]) -> Tensor:
    """Return the numbers of a client's text labels: int64 [n].

    A single client does not see every class, so it cannot number them by itself. Take the names of
    a simulation, :attr:`FederatedData.class_names`, or agree on them.

    Args:
        labels: The label of each example.
        class_names: Names of all classes, by number.

    Raises:
        DataError: A label is no class, or a class has two numbers.

    Example:
        >>> number_labels(["yes", "no", "yes"], class_names=["no", "yes"])
        tensor([1, 0, 1])
    """
    if isinstance(class_names, str):
        raise DataError(f"class_names is {class_names!r}; give a list of names")
    twice = [name for name, count in Counter(class_names).items() if count > 1]
    if twice:
        raise DataError(f"class_names has {twice[0]!r} twice; give each class one number")
    numbers = {name: number for number, name in enumerate(class_names)}
    numbered = []
    for row, label in enumerate(labels):
        if label not in numbers:
            raise DataError(
                f"row {row} has the label {label!r}, which is no class; "
                f"{did_you_mean(str(label), numbers)}the classes are {list(numbers)}: correct the "
                "label, or agree on the class with the other clients"
            )
        numbered.append(numbers[label])
    return torch.tensor(numbered, dtype=torch.int64)
