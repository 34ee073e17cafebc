"""Metrics of a model: on the test set, and client by client."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.oracle.configuration import SESSIONS, Configuration
from tests.oracle.reference.model import Model, Tensors
from tests.oracle.workloads import IGNORED, Examples, Inputs, largest_error, read

#: Whether larger values of each metric are better.
IS_BETTER_HIGH = {"loss": False, "accuracy": True, "largest": True}
#: Key of the augmentation in evaluations, so that it is the same every time.
EVALUATION_KEY = 0


def measure(
    c: Configuration, model: Model, x: Tensors, features: Inputs, labels: Tensor
) -> dict[str, float]:
    """Return the metrics of one set: means over its examples, or one metric of all of them."""
    outputs = model.predict(x, features)
    found = {"loss": model.loss(outputs, labels).item()}
    accuracy = model.accuracy(outputs, labels)
    if accuracy is not None:
        found["accuracy"] = accuracy
    if bool((labels == IGNORED).all()):
        found = {}  # there are no examples to average
    if c.metric:
        found["largest"] = largest_error(outputs, labels)
    return found


def evaluate(
    c: Configuration, model: Model, x: Tensors, examples: Examples, clients: Sequence[int]
) -> dict[str, float]:
    """Return all metrics in a round's record that concern the model after it."""

    def measure_read(of: Configuration, features: Inputs, labels: Tensor) -> dict[str, float]:
        return measure(of, model, x, read(c, features, EVALUATION_KEY), labels)

    found = measure_read(c, examples.test_features, examples.test_labels)
    # Over sessions clients report their own trainer's metrics; a user's trainer has no "largest".
    is_own = c.own == "trainer" and c.place in SESSIONS
    of_clients = replace(c, metric=False) if is_own else c
    each = [measure_read(of_clients, *examples.of(client)) for client in clients]
    for name in dict.fromkeys(name for own in each for name in own):
        values = np.sort([own[name] for own in each if name in own])
        parts = {"mean": values.mean(), "worst_decile": worst(values, name).mean()}
        parts["num_clients"] = len(values)
        parts |= {f"p{part}": np.quantile(values, part / 100) for part in (10, 50, 90)}
        found |= {f"clients/{name}_{part}": float(value) for part, value in parts.items()}
    return found


def worst(ascending: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return the worst tenth of a metric's values, at least one."""
    tenth = max(1, len(ascending) // 10)
    return ascending[:tenth] if IS_BETTER_HIGH[name] else ascending[-tenth:]


def is_due(c: Configuration, num_finished: int, num_rounds: int) -> bool:
    """Return whether the model is evaluated after so many rounds; after the last it always is."""
    every = c.evaluate_every
    return num_finished == num_rounds or (every > 0 and num_finished % every == 0)
