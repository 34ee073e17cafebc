"""A local trainer for any torch module on tensors: E epochs of SGD."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlearn.algorithms.local import LocalSgd, batch_positions
from fedlearn.client.resident import ResidentModel
from fedlearn.client.trainer import LocalEvaluation, LocalResult, TrainContext
from fedlearn.core.collecting import is_sound
from fedlearn.core.params import Params
from fedlearn.errors import DataError

#: Examples evaluated at a time; bounds memory, changes nothing else.
_EVALUATION_BATCH = 1024


class TorchTrainer:
    """Trains a torch module on one client's tensors as the coordinator asks.

    Args:
        model: What trains; several trainers may share one, a client at a time.
        features: Shape [n, ...].
        labels: Shape [n, ...].

    Raises:
        DataError: There are no examples, or not one label each.
    """

    def __init__(self, model: ResidentModel, features: Tensor, labels: Tensor) -> None:
        if len(features) == 0 or len(features) != len(labels):
            raise DataError(
                f"{len(features)} examples with {len(labels)} labels; a client trains on at "
                "least one example and each has one label"
            )
        self._model = model
        self._features = features.to(model.vector_P.device)
        self._labels = labels.to(model.vector_P.device)

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model after ``context.settings.epochs`` passes over the examples.

        Raises:
            ValueError: The settings are not those of :class:`~fedlearn.algorithms.local.LocalSgd`.
            KeyError: A tensor of the model is missing.
        """
        local = LocalSgd.from_settings(context.settings)
        params = self._params(tensors)
        batches = batch_positions(
            local,
            seed=context.seed,
            round_num=context.round_num,
            client_id=context.client_id,
            num_examples=len(self._labels),
        )
        velocity = self._model.new_velocity() if local.momentum else []
        if local.keep_momentum and context.state:
            for name, value in zip(self._model.trainable_names, velocity, strict=True):
                value.copy_(context.state[name])
        loss = self._model.train(
            params,
            self._features,
            self._labels,
            [torch.from_numpy(each).to(self._labels.device) for each in batches],
            local=local,
            velocity=velocity,
            seed=context.seed.derive("masks", context.round_num, context.client_id),
        )
        kept: Mapping[str, Tensor] = {}
        if local.keep_momentum:
            # A velocity that diverged would spoil every later round; what it was is kept.
            is_lost = not all(is_sound(value) for value in velocity)
            fresh = dict(zip(self._model.trainable_names, velocity, strict=True))
            kept = context.state if is_lost else fresh
        return LocalResult(
            tensors=self._model.layout.views(self._model.vector_P.clone()),
            num_examples=len(self._labels),
            metrics={"loss": loss},
            state=kept,
        )

    def evaluate(self, tensors: Mapping[str, Tensor]) -> LocalEvaluation:
        """Return the loss and metrics of the model in ``tensors`` on the examples."""
        values = self._model.measure(
            self._params(tensors), self._features, self._labels, batch_size=_EVALUATION_BATCH
        )
        means = {name: float(each.mean(dtype=torch.float64)) for name, each in values.items()}
        return LocalEvaluation(num_examples=len(self._labels), metrics=means)

    def _params(self, tensors: Mapping[str, Tensor]) -> Params:
        layout = self._model.layout
        vector = layout.pack(tensors, out=torch.empty_like(self._model.vector_P))
        constants = {name: t for name, t in tensors.items() if name not in layout.by_name}
        return Params(layout, vector, constants)
