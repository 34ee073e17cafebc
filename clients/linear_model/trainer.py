"""A client that fits a linear model to its own table with scikit-learn.

Environment:
    FEDLEARN_DATA: A CSV file with a header. All columns are numbers, in any order; the one named
        ``label`` is 0 or 1.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from torch import Tensor, nn

from fedlearn.client import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.errors import DataError

CLASSES = np.array([0, 1])
MIN_ROWS = 10


def make_model(num_features: int) -> nn.Module:
    """Build the model that the coordinator averages: coefficients and intercept, zero at first."""
    model = nn.Linear(num_features, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


class LogisticRegression:
    """A trainer that trains on four fifths of the rows and evaluates on every fifth.

    Values are standardized by this client's own training rows, whose statistics do not leave it.
    """

    honors = ("epochs", "extra.learning_rate", "extra.alpha")

    def __init__(self, x: NDArray[np.float64], y: NDArray[np.int64]) -> None:
        held_out = np.arange(len(y)) % 5 == 0
        mean, deviation = x[~held_out].mean(0), x[~held_out].std(0)
        x = (x - mean) / np.where(deviation > 0, deviation, 1.0)
        self.train_x, self.train_y = x[~held_out], y[~held_out]
        self.test_x, self.test_y = x[held_out], y[held_out]
        self.num_examples = len(self.train_y)  # the coordinator may require a minimum

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Train for ``epochs`` passes over the rows; each is one call of ``partial_fit``."""
        num_epochs, extra = int(str(context.settings["epochs"])), context.extra
        model = self._model(tensors, eta0=extra["learning_rate"], alpha=extra["alpha"])
        for epoch in range(num_epochs):
            context.control.check()
            model.set_params(random_state=context.seed.derive("epoch", epoch).value % 2**32)
            model.partial_fit(self.train_x, self.train_y)
            loss = log_loss(self.train_y, model.predict_proba(self.train_x), labels=CLASSES)
            context.control.report(fraction=(epoch + 1) / num_epochs, loss=loss)
        found = {"weight": torch.tensor(model.coef_), "bias": torch.tensor(model.intercept_)}
        num, metrics = len(self.train_y), {"loss": loss}
        return LocalResult(tensors=found, num_examples=num, metrics=metrics, state={})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Return loss and accuracy on the rows that are held out of training."""
        control.check()
        model = self._model(tensors)
        loss = log_loss(self.test_y, model.predict_proba(self.test_x), labels=CLASSES)
        metrics = {"loss": loss, "accuracy": model.score(self.test_x, self.test_y)}
        return LocalEvaluation(num_examples=len(self.test_y), metrics=metrics)

    def _model(self, tensors: Mapping[str, Tensor], **options: object) -> SGDClassifier:
        asked, there = tensors["weight"].shape[1], self.train_x.shape[1]
        if asked != there:
            raise DataError(f"the model has {asked} columns, but this client's table has {there}")
        model = SGDClassifier(loss="log_loss", learning_rate="constant", **{"eta0": 1, **options})
        model.partial_fit(self.train_x[:1], self.train_y[:1], classes=CLASSES)  # allocates coef_
        model.coef_, model.intercept_ = (tensors[n].double().numpy() for n in ("weight", "bias"))
        return model


def make_trainer() -> LogisticRegression:
    """Build the trainer on this client's table; raises DataError if the table is not usable."""
    path = os.environ.get("FEDLEARN_DATA")
    if not path:
        raise DataError("FEDLEARN_DATA is not set; name a CSV file with a column label of 0 and 1")
    try:
        header, *lines = Path(path).read_text().splitlines()
        columns = dict(zip(header.split(","), np.loadtxt(lines, delimiter=",").T, strict=True))
        labels = columns.pop("label")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"FEDLEARN_DATA: {path} has no table with a label: {error!r}") from error
    x = np.stack([columns[name] for name in sorted(columns)], axis=1)
    if len(labels) < MIN_ROWS or not (np.isfinite(x).all() and np.isin(labels, CLASSES).all()):
        raise DataError(
            f"FEDLEARN_DATA: {path} has {len(labels)} rows; give {MIN_ROWS} or more, of finite "
            "numbers, labeled 0 and 1"
        )
    return LogisticRegression(x, labels.astype(np.int64))
