"""Tests on a few examples whether a faster executor may train a model.

A faster executor replaces the module's forward pass by a trace of it, or by one that runs on many
clients at once. That is correct only if the forward pass is a pure function of tensors. So the
sequential executor trains the same clients several times, on two modules; neither the results nor
Python's state nor the random generators may change from one time to the next. Then the faster
executor trains the same clients for two rounds, and its models, lanes and client states must agree
with those of the sequential one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.elastic_averaging import without_force
from fedlearn.algorithms.local import LocalWork
from fedlearn.algorithms.noised_gradients import quiet
from fedlearn.algorithms.objectives import Objective
from fedlearn.core.params import Params, TensorSpec
from fedlearn.core.randomness import Seed, preserve_global_generators
from fedlearn.errors import EngineError
from fedlearn.simulation.executors.base import Executor, TrainedBlock, Work
from fedlearn.simulation.executors.python_state import digests
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.executors.stacked_gradient import BlockGradient, first_line, spread_rows
from fedlearn.simulation.population import ClientRows
from fedlearn.simulation.schedule import schedule
from fedlearn.training.keyed_dropout import preserve_generator
from fedlearn.training.resident import Precision, ResidentModel

#: Number of times that one module trains the same clients.
_TIMES = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """A trial round of two clients with three and two examples, for two epochs.

    Attributes:
        work: The clients' work.
        reference: Result of the sequential executor.
        rounding: The effect of rounding on the result: how much each tensor of the model, each
            lane and each tensor of client state differs if the initial weights change by a few
            units of rounding. It can be large: Adam takes a full step for a gradient that consists
            of rounding errors only, such as that of a bias before a BatchNorm.
        precision: Precision of the forward and backward pass.
    """

    work: Work
    reference: TrainedBlock
    rounding: Mapping[str, float]
    precision: Precision

    def difference(self, found: TrainedBlock) -> str | None:
        """Describe a difference from the reference that rounding does not explain, if any."""
        params, expected = self.work.params, self.reference
        least = 16 * torch.finfo(params.layout.dtype).eps * (1 + params.vector.abs().max())
        least = least + self._share * expected.deltas_KP.abs().max() / 100
        ours, theirs = _tensors(found, params), _tensors(expected, params)
        return self._difference(ours, theirs, least=float(least)) or self._difference(
            _reports(found), _reports(expected), least=0.0
        )

    def _difference(
        self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, least: float
    ) -> str | None:
        for name, value in expected.items():
            if name not in found or found[name].shape != value.shape:
                return f"{name} of another shape"
            error, size = _largest(found[name] - value), _largest(value)
            # 16 times the measured effect of rounding: one sample of it is no upper bound.
            tolerance = self._share * size + 16 * self.rounding[name] + least
            if not error <= tolerance:  # `not` makes a NaN a difference
                return f"{name} differently, by {error:.1e}"
        return None

    @property
    def _share(self) -> float:
        return 1e-3 if self.precision is Precision.FLOAT32 else 1e-1


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """Two trial rounds of the same clients, the second one with client state from the first.

    Attributes:
        rounds: The rounds, in order.
    """

    rounds: Sequence[Round]

    def objection(self, make_executor: Callable[[], Executor]) -> str | None:
        """Return the reason why an executor must not train this model, or ``None`` if it may."""
        try:
            executor = make_executor()
            for each in self.rounds:
                if difference := each.difference(executor.train(each.work)):
                    return f"stacked clients train {difference}"
        except EngineError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - custom code runs on tensors it does not expect
            return describe_first_line(error)
        return None


def trial_of(
    make_model: Callable[[], nn.Module],
    objective: Objective,
    work: Work,
    *,
    precision: Precision,
    shift: int = 0,
) -> Trial | str:
    """Prepare the trial of a model, or return why the model must train one client at a time.

    Args:
        make_model: Builds the module.
        objective: The loss.
        work: The work to be done. The trial uses some of its examples, of any clients.
        precision: Precision of the forward and backward pass.
        shift: Number of rows by which to move the choice of examples, if the first ones turn out
            to be unusable.

    Raises:
        EngineError: ``make_model`` builds a model with different tensors on each call.
        Exception: Any exception that custom code raises.
    """
    params, device = work.params, work.params.vector.device
    for spec in params.layout.others:
        return f"{spec.name!r} is {spec.dtype}, not {params.layout.dtype}, and trains in that dtype"
    rows = (spread_rows(len(work.labels), 5, like=work.labels) + shift) % len(work.labels)
    sample = _sample_of(work, rows.cpu().numpy())
    with preserve_global_generators(), preserve_generator(torch.default_generator):
        build = partial(ResidentModel, make_model, objective, device=device, precision=precision)
        first = build()
        second, third = build(memory=first.frozen), build(memory=first.frozen)
        for model in (first, second, third):
            _require_layout(model, params)
        gradient = BlockGradient(
            make_model, objective, device=device, precision=precision, constants=params.constants
        )
        if gradient.draws_random_numbers(work.features, work.labels, rows=rows):
            return "it draws random numbers in its forward pass"
        runs, states, moves = list[TrainedBlock](), list[Mapping[str, bytes]](), list[bool]()
        # 1. Train the same clients several times on one module, then on a second one.
        for model in (*(first,) * _TIMES, second):
            with preserve_global_generators() as have_moved:
                runs.append(_train(model, sample))
                moves.append(have_moved())
            states.append(digests(model.module, objective))
        if all(moves):  # other threads may move the generators once in a while
            return "it draws random numbers of Python or numpy in its forward pass"
        # On a fresh module, which has been called as often as the first one had for `runs[0]`: a
        # forward pass that changes from call to call must not add to the effect of rounding.
        first_round = _round(third, sample, runs[0], precision)
    # Skip the first run, since a value that is computed once and cached is as good as a constant.
    before, after = states[_TIMES - 2 : _TIMES]
    # 2. Python's state must not have changed between the last two runs,
    changed = [name for name in before if before[name] != after.get(name)]
    if changed:
        return f"its forward pass changes {changed[0]} from call to call"
    # 3. nor the result, on the same module or on another one.
    for again in runs[1:_TIMES]:
        if difference := first_round.difference(again):
            return f"a second training of the same clients trains {difference}"
    if difference := first_round.difference(runs[-1]):
        return f"a second model of make_model() trains {difference}"
    with preserve_generator(torch.default_generator):
        # 4. The second round starts from client state, which the first one does not have.
        following = _following(sample, runs[0])
        second_round = _round(first, following, _train(first, following), precision)
    return Trial(rounds=(first_round, second_round))


def describe_first_line(error: Exception) -> str:
    """Return the type and first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"


def _require_layout(model: ResidentModel, params: Params) -> None:
    if model.layout != params.layout:
        theirs, mine = params.layout.by_name, model.layout.by_name
        name = next(n for n in (*theirs, *mine) if theirs.get(n) != mine.get(n))
        raise EngineError(
            f"make_model() builds a different model on each call: {name!r} is "
            f"{_describe_spec(theirs.get(name))}, then {_describe_spec(mine.get(name))}; do not "
            "let it depend on state that changes"
        )


def _describe_spec(spec: TensorSpec | None) -> str:
    return "missing" if spec is None else f"{spec.dtype} {list(spec.shape)} at {spec.offset}"


def _train(model: ResidentModel, work: Work) -> TrainedBlock:
    trained = SequentialExecutor(model).train(work)
    return replace(trained, deltas_KP=trained.deltas_KP.clone())


def _round(
    model: ResidentModel, work: Work, reference: TrainedBlock, precision: Precision
) -> Round:
    """Measure the effect of rounding: train once more from slightly changed initial weights."""
    vector = work.params.vector
    noise = torch.rand(vector.shape, generator=Seed(0).torch(), dtype=vector.dtype)
    shift = 4 * torch.finfo(vector.dtype).eps * (2 * noise - 1).to(vector.device)
    moved = replace(work, params=work.params.with_vector(vector * (1 + shift)))
    found, expected = (
        _tensors(trained, work.params) | _reports(trained)
        for trained in (_train(model, moved), reference)
    )
    rounding = {name: _largest(found[name] - value) for name, value in expected.items()}
    return Round(work=work, reference=reference, rounding=rounding, precision=precision)


def _following(work: Work, trained: TrainedBlock) -> Work:
    """Return the work of the next round, from the mean model and with the clients' state."""
    moved = work.params.with_vector(work.params.vector + trained.deltas_KP.mean(0))
    return replace(
        work, params=moved, round_num=work.round_num + 1, client_state=trained.client_state
    )


def _tensors(trained: TrainedBlock, params: Params) -> dict[str, Tensor]:
    """Return the clients' deltas by tensor, [K, ...] each, under their names in messages."""
    views = params.layout.views(trained.deltas_KP)
    return {repr(name): moves for name, moves in views.items()}


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _reports(trained: TrainedBlock) -> dict[str, Tensor]:
    """Return lanes and client state, [K, n] each, under their names in messages."""
    lanes = {f"the lane {name!r}": rows for name, rows in trained.lanes.items()}
    return lanes | {
        f"the client state {name!r}": rows for name, rows in trained.client_state.items()
    }


def _sample_of(work: Work, rows: NDArray[np.int64]) -> Work:
    """Return the work of two clients with three and two of five ``rows``, for two epochs.

    It keeps the configured batch size, because stacked steps are laid out for it.
    """
    client_ids = np.arange(2)
    batches = schedule(
        LocalWork(epochs=2, batch_size=work.local.work.batch_size, shuffle=False),
        ClientRows(work.features, work.labels, rows, np.array([0, 3, 5])),
        client_ids,
        round_num=0,
        seed=Seed(0),
        dtype=work.params.layout.dtype,
        device=work.labels.device,
    )
    return replace(
        work,
        # Real noise would make any two trainings differ.
        local=quiet(without_force(work.local)),
        client_ids=client_ids,
        rows_K=np.split(rows, [3]),
        schedule=batches,
        round_num=0,
        seed=Seed(0),
        client_state={},
    )
