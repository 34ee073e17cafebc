"""Answers queries from a client's examples, without a model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

import torch
from torch import Tensor

from fedlearn.algorithms.query import Query
from fedlearn.algorithms.settings import update_from
from fedlearn.core.features import Features
from fedlearn.errors import UnusableResult
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext


@dataclass(frozen=True, eq=False)
class QueryTrainer:
    """A trainer that holds only data: it answers queries, and refuses to train.

    Attributes:
        features: The client's features, [n, ...] each.
        labels: Its labels: [n, ...].
        queries: The classes that it answers. It runs no other code for the coordinator, which sends
            a class name and the values of the fields.

    Example:
        >>> from fedlearn.algorithms.statistics import Moments
        >>> trainer = QueryTrainer(torch.eye(3), torch.arange(3), queries=[Moments])
        >>> trainer.num_examples
        3
    """

    features: Features
    labels: Tensor
    queries: Sequence[type[Query]]

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return len(self.labels)

    @property
    def honors(self) -> Collection[str]:
        """Names of the queries and of their fields."""
        names = {kind.__name__ for kind in self.queries}
        return names | {field.name for kind in self.queries for field in fields(kind)}

    def train(
        self,
        tensors: Mapping[str, Tensor],  # noqa: ARG002 - there are none
        *,
        context: TrainContext,
    ) -> LocalResult:
        """Answer the query in the settings; there are no tensors to train.

        Raises:
            SettingsRefused: The query is not one of :attr:`queries`, or its fields are wrong.
            UnusableResult: The answer is not what the query declares.
        """
        query = update_from(context.settings, known=self.queries)
        if not isinstance(query, Query):
            self._refuse()
        context.control.check()
        device = self.labels.device
        broadcast = {name: value.to(device) for name, value in context.broadcast.items()}
        answers, who = query.answer(self.features, self.labels, broadcast=broadcast), type(query)
        lanes, specs = {}, query.sums
        if wrong := sorted(answers.keys() ^ specs.keys()):
            raise UnusableResult(
                f"{who.__name__}.answer has missing or extra tensors: {wrong[:3]}; return those "
                "that sums declares"
            )
        for name, spec in specs.items():
            value = torch.as_tensor(answers[name])
            if value.shape != spec.shape:
                raise UnusableResult(
                    f"{who.__name__}.answer returned {name!r} of shape {tuple(value.shape)}, but "
                    f"sums declares {spec.shape}"
                )
            lanes[name] = value.double().reshape(-1)
        # The number of examples has no noise, so it would show a single one.
        hides_examples = any(spec.example_bound is not None for spec in specs.values())
        return LocalResult(
            tensors={},
            num_examples=1 if hides_examples else self.num_examples,
            metrics={},
            state={},
            lanes=lanes,
        )

    def evaluate(
        self,
        tensors: Mapping[str, Tensor],  # noqa: ARG002 - refused
        *,
        control: TaskControl,  # noqa: ARG002 - refused
    ) -> LocalEvaluation:
        """Refuse, since there is no model to evaluate.

        Raises:
            UnusableResult: Always.
        """
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnusableResult(
            "this client has a QueryTrainer, which has no model; ask it queries, or give it a "
            "TorchTrainer"
        )
