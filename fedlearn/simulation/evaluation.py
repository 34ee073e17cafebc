"""Evaluation in a simulation: on a central test set, and on each client's examples."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.knn_per import find_neighbors
from fedlearn.algorithms.personal_models import (
    build_personal_model,
    has_personal_models,
    has_personal_update,
    name_personal,
)
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.client_metrics import ClientMetrics, EvaluationOutcome
from fedlearn.core.cluster import Cluster, gather
from fedlearn.core.distribution import Direction, summarize_metrics
from fedlearn.core.features import Features, list_tensors, move_to_device, slice_rows
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.session.faults import describe_failure, is_failure
from fedlearn.simulation.fine_tuning import SimulatedFineTuning
from fedlearn.simulation.population import ClientRows, Population, unread_rows
from fedlearn.training.resident import ResidentModel, SetMeasures, iter_batches

#: Most clients whose examples are in memory at the same time.
_CLIENTS_AT_ONCE = 64
#: Most bytes of examples read from a dataset that are cached for the next evaluation.
_KEPT_BYTES = 256 << 20

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class CentralEvaluator:
    """Evaluates the model on a central test set, split among the workers.

    Attributes:
        features: Shape [N, ...], or several such inputs.
        labels: Shape [N, ...].
        batch_size: Examples per batch.
    """

    model: ResidentModel
    features: Features
    labels: Tensor
    batch_size: int
    cluster: Cluster

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        """Compute the ``loss`` and each metric, as a mean over examples or on the whole set."""
        mine = _take_share(len(self.labels), self.cluster)
        found = self.model.measure(
            model.params,
            slice_rows(self.features, mine),
            self.labels[mine],
            batch_size=self.batch_size,
        )
        weighted = found.weigh()
        means = dict[str, float]()
        if weighted:
            # For each metric, the sum of weight times value and the sum of weights.
            sums = torch.stack([each.sum() for pair in weighted.values() for each in pair]).cpu()
            self.cluster.all_reduce([sums])
            means = dict(zip(weighted, (sums[::2] / sums[1::2]).tolist(), strict=True))
        return EvaluationOutcome(metrics=means | self._whole(found.outputs, mine))

    def _whole(self, outputs: Tensor, mine: slice) -> dict[str, float]:
        """Compute the metrics that need the whole set, from the outputs of all workers."""
        measures = self.model.measures
        if not measures.needs_whole_sets:
            return {}
        everything = outputs
        if self.cluster.world_size > 1:
            # Each row is zero on all workers but one, so the sum concatenates their shares.
            everything = outputs.new_zeros(len(self.labels), *outputs.shape[1:])
            everything[mine] = outputs
            self.cluster.all_reduce([everything])
        # Only on rank 0: a custom function might return a different value on each worker.
        values = measures.whole(everything, self.labels) if self.cluster.rank == 0 else None
        return self.cluster.broadcast(values)


class ReadOnce:
    """A population that caches the examples read from a dataset, for repeated evaluation.

    Evaluation reads the same values every time, so they are cached, up to a limit. Examples that
    are in memory already are not copied.

    Args:
        population: The clients.
    """

    def __init__(self, population: Population) -> None:
        self._population, self._num_bytes = population, 0
        self._kept = dict[bytes, ClientRows]()

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self._population.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return self._population.num_examples(client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the examples of these clients, in this order.

        Raises:
            DataError: An example that was just read is invalid.
        """
        # Evaluation asks for the same blocks of clients every time, so a whole block is the key.
        key = client_ids.tobytes()
        if key in self._kept:
            return self._kept[key]
        rows = self._population.load(client_ids)
        if unread_rows(self._population, client_ids) is not None:
            num_bytes = sum(tensor.nbytes for tensor in (*list_tensors(rows.features), rows.labels))
            if self._num_bytes + num_bytes <= _KEPT_BYTES:
                self._kept[key], self._num_bytes = rows, self._num_bytes + num_bytes
        return rows


@dataclass(frozen=True, kw_only=True)
class ClientEvaluator:
    """Evaluates the model on each client of a fixed sample.

    Attributes:
        client_ids: The sampled clients, the same every time: shape [n].
        batch_size: Examples per batch.
        strategy: The algorithm, which builds the clients' personal models; ``None``: they have
            none.
        fine_tuning: Fine-tunes each client's model before it is measured as the personal one;
            ``None``: nothing does.
        training: The clients with the examples that they train on, if these are others than those
            of ``population``; ``None``: they are the same.
    """

    model: ResidentModel
    population: Population
    client_ids: NDArray[np.int64]
    batch_size: int
    cluster: Cluster
    strategy: Strategy | None
    fine_tuning: SimulatedFineTuning | None = None
    training: Population | None = None

    @cached_property
    def _directions(self) -> Mapping[str, Direction]:
        directions = self.model.measures.directions
        if self._has_personal:
            directions = {**directions, **name_personal(directions)}
        return directions

    @property
    def _has_personal(self) -> bool:
        keeps = self.strategy is not None and has_personal_models(self.strategy)
        return self.fine_tuning is not None or keeps

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        """Compute the loss and each metric of the clients, and their distribution.

        If clients have personal models, these are measured as well. A client whose evaluation
        raises an error is left out, as in a deployment.

        Raises:
            EngineError: No client can be evaluated.
        """
        sample, directions = self.client_ids, self._directions
        mine = _take_share(len(sample), self.cluster)
        values_MC, reasons = np.zeros((len(directions), len(sample))), dict[int, str]()
        for start in range(mine.start, mine.stop, _CLIENTS_AT_ONCE):
            part = slice(start, min(mine.stop, start + _CLIENTS_AT_ONCE))
            found = self._measure_each(model, sample[part], reasons)
            values_MC[:, part] = [found[name] for name in directions]
        is_failed_C = np.isin(sample, list(reasons)).astype(np.float64)
        self.cluster.all_reduce([torch.from_numpy(values_MC), torch.from_numpy(is_failed_C)])
        # After the all-reduce every worker sees the same failures: all raise, or none does.
        if is_failed_C.all():
            client_id, reason = min(min(each.items()) for each in gather(reasons, self.cluster))
            raise EngineError(f"no client can be evaluated; client {client_id}: {reason}")
        measured = sample[is_failed_C == 0.0]
        clients = ClientMetrics(
            measured_after=model.round_num,
            client_ids=measured.tolist(),
            num_examples=self.population.num_examples(measured).tolist(),
            metrics=dict(sorted(zip(directions, values_MC[:, is_failed_C == 0.0], strict=True))),
            directions=directions,
        )
        spread = summarize_metrics(clients.metrics, directions=directions)
        return EvaluationOutcome(metrics=spread, clients=clients)

    def _measure_each(
        self, model: GlobalModel, client_ids: NDArray[np.int64], reasons: dict[int, str]
    ) -> dict[str, NDArray[np.float64]]:
        """Evaluate clients; NaN for those that fail, whose reasons are added to ``reasons``."""
        try:
            return self._measure(model, client_ids)
        except BaseException as error:  # a client boundary: custom code raises anything
            if not is_failure(error):
                raise
            if len(client_ids) == 1:
                client_id = int(client_ids[0])
                reasons[client_id] = reason = describe_failure(error)
                log.warning("client_evaluation_failed", client_id=client_id, reason=reason)
                return {name: np.asarray([math.nan]) for name in self._directions}
        parts = [self._measure_each(model, each, reasons) for each in client_ids[:, None]]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _measure(
        self, model: GlobalModel, client_ids: NDArray[np.int64]
    ) -> dict[str, NDArray[np.float64]]:
        rows = self.population.load(client_ids)
        features, labels = rows.gather()
        params = model.params
        features, labels = (
            move_to_device(features, params.vector.device),
            labels.to(params.vector.device),
        )
        # All clients in one pass: in evaluation mode the model treats examples independently.
        found = self.model.measure(params, features, labels, batch_size=self.batch_size)
        sizes = np.diff(rows.offsets)
        means = self._average(found, sizes)
        if not self._has_personal:
            return means
        personal = {name: values.copy() for name, values in means.items()}
        ends = zip(client_ids.tolist(), rows.offsets.tolist(), sizes.tolist(), strict=False)
        for place, (client_id, begin, size) in enumerate(ends):
            own = self._build_personal(model, client_id)
            neighbors = None if self.strategy is None else find_neighbors(self.strategy.local)
            if own is None and neighbors is None:  # the client uses the global model
                continue
            part = slice(begin, begin + size)
            inputs, targets = slice_rows(features, part), labels[part]
            if neighbors is None:
                found = self.model.measure(
                    own or params, inputs, targets, batch_size=self.batch_size
                )
            else:
                batches = iter_batches(inputs, targets, batch_size=self.batch_size)
                stored = self._iter_training(client_id, device=targets.device)
                found = self.model.measure_with_neighbors(
                    own or params,
                    neighbors,
                    stored=stored or batches,
                    evaluated=batches if stored else None,
                )
            for name, (value,) in self._average(found, np.asarray([size])).items():
                personal[name][place] = value
        return means | name_personal(personal)

    def _iter_training(
        self, client_id: int, *, device: torch.device
    ) -> Iterator[tuple[Features, Tensor]] | None:
        """Return a client's training examples in batches; ``None``: they are the evaluated ones."""
        if self.training is None:
            return None
        features, labels = self.training.load(np.asarray([client_id])).gather()
        return iter_batches(
            move_to_device(features, device), labels.to(device), batch_size=self.batch_size
        )

    def _build_personal(self, model: GlobalModel, client_id: int) -> Params | None:
        """Return a client's personal model; ``None`` if it is the global one."""
        own = self._build_own(model, client_id)
        if self.fine_tuning is None:
            return own
        start = model.params.complete() if own is None else own
        return self.fine_tuning.tune(start, client_id=client_id, round_num=model.round_num)

    def _build_own(self, model: GlobalModel, client_id: int) -> Params | None:
        """Return the model that a client keeps; ``None`` if it has none yet."""
        state = model.client_states.get(client_id)
        if self.strategy is None or not state or not has_personal_models(self.strategy):
            return None
        params, local = model.params.complete(), self.strategy.local
        tensors = build_personal_model(
            params.to_tensors(),
            state,
            local_names=model.params.local,
            trained_names=[spec.name for spec in params.layout.trainable],
            local=local if has_personal_update(local) else None,
        )
        vector = params.layout.pack(tensors, out=torch.empty_like(params.vector))
        return params.with_vector(vector)

    def _average(
        self, found: SetMeasures, sizes: NDArray[np.int64]
    ) -> dict[str, NDArray[np.float64]]:
        """Compute each metric of clients with these numbers of examples: one value per client."""
        owner, means = np.repeat(np.arange(len(sizes)), sizes), dict[str, NDArray[np.float64]]()
        for name, pair in found.weigh().items():
            sums, weights = (
                np.bincount(owner, each.cpu().numpy(), minlength=len(sizes)) for each in pair
            )
            # NaN if none of a client's examples counts, which leaves it out of the distribution.
            means[name] = np.where(
                weights > 0.0, sums / np.where(weights > 0.0, weights, 1.0), np.nan
            )
        return means | self._whole(found, sizes.tolist())

    def _whole(self, found: SetMeasures, sizes: list[int]) -> dict[str, NDArray[np.float64]]:
        measures = self.model.measures
        if not measures.needs_whole_sets:
            return {}
        own = zip(found.outputs.split(sizes), found.labels.split(sizes), strict=True)
        values = [measures.whole(*each) for each in own]
        return {name: np.asarray([each[name] for each in values]) for name in values[0]}


def _take_share(num: int, cluster: Cluster) -> slice:
    ends = np.linspace(0, num, cluster.world_size + 1).astype(int)
    return slice(ends[cluster.rank], ends[cluster.rank + 1])


def sample_clients(population: int, num_clients: int, seed: Seed) -> NDArray[np.int64]:
    """Sample the clients to evaluate, the same in every round: shape [num_clients]."""
    rng = seed.derive("evaluated clients").numpy()
    return np.sort(rng.choice(population, num_clients, replace=False))
