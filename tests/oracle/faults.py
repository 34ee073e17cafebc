"""Deliberate faults in fedlearn, each of which the walk must detect.

A fault is a patch: an attribute of a module or class, and its replacement. ``touches`` selects
the configurations of the walk in which it could have an effect, so that the others need not run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fedlearn.algorithms import local, server_optimizers, transforms
from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.elastic_averaging import ElasticAveraging, ElasticForce
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import LocalSgd, Moment
from fedlearn.algorithms.median import CoordinateMedian
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.round_state import CohortRoundState, RoundState
from fedlearn.algorithms.scaffold import ControlVariates, ScaffoldAveraging
from fedlearn.algorithms.server_optimizers import ServerAdaptive, ServerSgd
from fedlearn.algorithms.staleness import Staleness
from fedlearn.algorithms.transforms import NoisedUpdates
from fedlearn.client.home import Home
from fedlearn.core.participations import Participations
from fedlearn.privacy import banded_noise, bounded_sum
from fedlearn.privacy.adaptive_clipping import AdaptiveClip
from fedlearn.privacy.bounded_sum import NoisyMean
from fedlearn.privacy.secret import DiscreteGaussianNoise
from fedlearn.rounds import run as rounds_run
from fedlearn.rounds.distributed_mean import DistributedMean
from fedlearn.secagg.plan import SecurePlan
from fedlearn.simulation import (
    engine,
    evaluation,
    reduction,
    schedule,
)
from fedlearn.simulation.executors.fused import executor as fused_executor
from fedlearn.simulation.executors.stacked_trace import TracedSteps
from fedlearn.simulation.population import UnreadRows
from fedlearn.transport.flower import node
from tests.oracle.configuration import SESSIONS, Configuration
from tests.oracle.covering import walk_simplest
from tests.oracle.walk import judge

#: Maps a function of fedlearn to its faulty version.
Change = Callable[[Any], Any]  # Any: functions, properties and methods of any kind


@dataclass(frozen=True)
class Fault:
    """A deliberate mistake in fedlearn.

    Attributes:
        name: The mistake, in a few words.
        place: The module or class.
        attribute: The name of the replaced attribute.
        change: Returns the replacement, given the original.
        touches: Whether it could have an effect in a configuration.
    """

    name: str
    place: Any  # Any: a module or a class
    attribute: str
    change: Change
    touches: Callable[[Configuration], bool] = lambda _: True

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Apply the fault within a block."""
        right = vars(self.place)[self.attribute]
        with patch.object(self.place, self.attribute, self.change(right)):
            yield


def find_disagreement(fault: Fault) -> Configuration | None:
    """Return the simplest configuration in which the fault causes a disagreement.

    A walk contains every pair of values, so it finds faults that need only one or two of them.
    """
    touched = (c for c in walk_simplest() if fault.touches(c))
    with fault.apply():
        disagreeing = (c for c in touched if judge(c).kind == "disagrees")
        return next(disagreeing, None)


def _is(option: str, *values: object) -> Callable[[Configuration], bool]:
    return lambda c: getattr(c, option) in values


def _stale(c: Configuration) -> bool:
    return c.rounds in ("late", "buffered") or c.algorithm in ("fedbuff", "fedasync")


def _has_momentum(c: Configuration) -> bool:
    return c.optimizer in ("momentum", "momentum_kept")


def _has_adam(c: Configuration) -> bool:
    return c.optimizer.startswith("adam")


def _keeps(c: Configuration) -> bool:
    return c.optimizer.endswith("_kept") or c.algorithm in ("scaffold", "easgd")


def _constant(value: Any) -> Change:
    return lambda _: value


def _with_moment(change: Callable[[Moment], Moment]) -> Change:
    def wrong(right: Any) -> Any:
        return lambda self, moment: right(self, change(moment))

    return wrong


def _decay_after_step(right: Any) -> Any:
    def wrong(
        self: LocalSgd, x: Any, grads: Any, memory: Any, *, broadcast: Any, moment: Any
    ) -> None:
        rate = self.learning_rate * moment.rate
        for place, (value, g) in enumerate(zip(x, grads, strict=True)):
            d = g
            if self.momentum:
                velocity = memory["velocity"][place]
                velocity.mul_(self.momentum).add_(g)
                d = velocity
            value.sub_(d, alpha=rate)
            value.mul_(1.0 - rate * self.weight_decay)

    return wrong


def _clip_by_tensor(right: Any) -> Any:
    def wrong(self: Any, x: Any, grads: Any, memory: Any, *, broadcast: Any, moment: Any) -> None:
        clipped = []
        for g in grads:
            norm_K = torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1)
            scale_K = (self.gradient_clip_norm / norm_K).clamp(max=1.0)
            clipped.append(g * scale_K.view(-1, *[1] * (g.dim() - 1)))
        self.inner.step(x, clipped, memory, broadcast=broadcast, moment=moment)

    return wrong


def _no_clip(right: Any) -> Any:
    def wrong(self: Any, x: Any, grads: Any, memory: Any, *, broadcast: Any, moment: Any) -> None:
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)

    return wrong


def _force_after_step(right: Any) -> Any:
    def wrong(self: Any, x: Any, grads: Any, memory: Any, *, broadcast: Any, moment: Any) -> None:
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)
        if moment.step == 0:
            for value, model in zip(x, broadcast["model"], strict=True):
                value.sub_((value - model) * self.share)
            torch._foreach_add_(list(memory["is_pulled"]), 1.0)

    return wrong


def _no_bias_correction(right: Any) -> Any:
    def wrong(self: Any, x: Any, grads: Any, memory: Any, *, broadcast: Any, moment: Any) -> None:
        before = [value.clone() for value in memory["num_steps"]]
        for value in memory["num_steps"]:
            value.fill_(1e6)
        right(self, x, grads, memory, broadcast=broadcast, moment=moment)
        for value, old in zip(memory["num_steps"], before, strict=True):
            value.copy_(old + 1)

    return wrong


def _nobody_keeps(right: Any) -> Any:
    def wrong(self: Any) -> Any:
        return {name: replace(spec, is_kept=False) for name, spec in right.fget(self).items()}

    return property(wrong)


def _lower_median(right: Any) -> Any:
    def wrong(self: Any, updates: Any) -> Any:
        return {
            name: torch.stack(list(rows)).median(dim=0).values
            for name, rows in updates.lanes.items()
        }

    return wrong


def _server_step(change: Callable[[Any, Any, Any, Any, Any], Any]) -> Change:
    def wrong(right: Any) -> Any:
        return lambda self, params, delta, state: change(right, self, params, delta, state)

    return wrong


def _scaffold_share(right: Any) -> Any:
    def wrong(self: Any, params: Any, aggregate: Any, state: Any) -> Any:
        whole = replace(aggregate, num_clients=self.num_clients)
        return right(self, params, whole, state)

    return wrong


def _keeps_old_control(right: Any) -> Any:
    def wrong(self: Any, x: Any, memory: Any, *, broadcast: Any, moment: Any) -> Any:
        before = [value.clone() for value in memory["control"]]
        reported = right(self, x, memory, broadcast=broadcast, moment=moment)
        for value, old in zip(memory["control"], before, strict=True):
            value.copy_(old)
        return reported

    return wrong


def _counts_stale_twice(right: Any) -> Any:
    def wrong(self: Any, staleness_B: Any) -> Any:
        return right(self, staleness_B) * np.where(staleness_B > 0, 2.0, 1.0)

    return wrong


def _same_order_each_epoch(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        orders = right(*args, **kwargs)
        return np.repeat(orders[:, :1], orders.shape[1], axis=1)

    return wrong


def _resume_forgets(attribute: str) -> Change:
    def wrong(right: Any) -> Any:
        def restore(*args: Any, **kwargs: Any) -> Any:
            state = right(*args, **kwargs)
            return replace(state, server=replace(state.server, **{attribute: {}}))

        return restore

    return wrong


def _best_tenth(right: Any) -> Any:
    def wrong(per_client: Any, *, directions: Any) -> Any:
        turned = {name: "min" if way == "max" else "max" for name, way in directions.items()}
        return right(per_client, directions=turned)

    return wrong


def _loss_by_clients(right: Any) -> Any:
    def wrong(self: Participations) -> float:
        known = self.losses[(self.codes == 0) & ~np.isnan(self.losses)]
        return float(known.mean()) if known.size else float("nan")

    return wrong


def _one_more(right: Any) -> Any:
    def wrong(self: Any, task: Any, row: Any) -> None:
        right(self, task, row)
        self._num_fresh -= len(self.counted) == 1

    return wrong


def _first_attempt(right: Any) -> Any:
    def wrong(self: Any, client_ids: Any, request: Any) -> Any:
        return right(self, client_ids, replace(request, round_num=max(0, request.round_num - 1)))

    return wrong


def _statistics_stay(right: Any) -> Any:
    def wrong(params: Any, delta_P: Any, update: Any) -> Any:
        after, split = right(params, delta_P, update), params.layout.num_trainable
        return after.with_vector(torch.cat([after.vector[:split], params.vector[split:]]))

    return wrong


def _divides_by_reports(right: Any) -> Any:
    def wrong(self: Any, aggregate: Any, **kwargs: Any) -> Any:
        return right(replace(self, expected=max(1, aggregate.num_clients)), aggregate, **kwargs)

    return wrong


def _examples_unclipped(right: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        wide = replace(self, example_clip_norm=100.0)
        return [each * (wide.level / self.level) for each in right(wide, *args, **kwargs)]

    return wrong


def _mean_of_examples(_: Any) -> Any:
    return lambda self, outputs, labels: self.losses(outputs, labels).mean()


def _counts_padding(right: Any) -> Any:
    def wrong(self: Any, stack: Any, shared: Any, batch: Any) -> Any:
        if self._is_compiled:
            batch = replace(
                batch, weights=torch.full_like(batch.weights, float(batch.weights.max()))
            )
        return right(self, stack, shared, batch)

    return wrong


def _unsmoothed(right: Any) -> Any:
    def wrong(self: CrossEntropy) -> None:
        right(self)
        object.__setattr__(self, "label_smoothing", 0.0)

    return wrong


def _keeps_nothing(right: Any) -> Any:
    @contextmanager
    def wrong(context: Any) -> Iterator[Any]:
        with right(context) as store:
            before = store.state
            yield store
            store.keep(before)

    return wrong


def _loads_nothing(right: Any) -> Any:
    return lambda update, memory, **_: right(update, memory, client_state={})


def _first_epoch_alone(right: Any) -> Any:
    return lambda self, epochs_of: right(self, lambda client: epochs_of(client)[:1])


FAULTS: tuple[Fault, ...] = (
    Fault(
        "examples do not weigh",
        WeightedMean,
        "weigh",
        _constant(lambda _, num_B: torch.ones_like(num_B)),
        lambda c: c.by_examples and c.own == "none",
    ),
    Fault(
        "an override of weigh is not called",
        engine,
        "weights",
        _constant(WeightedMean.weigh),
        _is("own", "weigh"),
    ),
    Fault(
        "a mean is divided by the number of clients",
        WeightedMean,
        "finalize",
        lambda right: (
            lambda self, state: right(self, replace(state, weight=state.num_clients.clone()))
        ),
        lambda c: c.by_examples,
    ),
    Fault(
        "updates are not clipped",
        transforms,
        "clip_rows",
        _constant(lambda rows, **_: rows),
        lambda c: c.update_clip > 0,
    ),
    Fault(
        "gradients are not clipped",
        ClippedGradients,
        "step",
        _no_clip,
        lambda c: c.gradient_clip > 0,
    ),
    Fault(
        "gradients are clipped tensor by tensor",
        ClippedGradients,
        "step",
        _clip_by_tensor,
        lambda c: c.gradient_clip > 0,
    ),
    Fault(
        "weights decay after the step",
        LocalSgd,
        "step",
        _decay_after_step,
        lambda c: c.weight_decay > 0 and _has_momentum(c),
    ),
    Fault(
        "kept momentum is lost",
        LocalSgd,
        "memory",
        _nobody_keeps,
        _is("optimizer", "momentum_kept"),
    ),
    Fault(
        "kept moments are lost",
        LocalAdam,
        "memory",
        _nobody_keeps,
        _is("optimizer", "adam_kept", "adamw_kept"),
    ),
    Fault("Adam does not correct its bias", LocalAdam, "step", _no_bias_correction, _has_adam),
    Fault(
        "a schedule is a round ahead",
        ScheduledRate,
        "factor",
        _with_moment(lambda moment: moment._replace(round_num=moment.round_num + 1)),
        _is("schedule", "decay", "cosine"),
    ),
    Fault(
        "a warm-up is a step ahead",
        ScheduledRate,
        "factor",
        _with_moment(lambda moment: moment._replace(step=moment.step + 1)),
        _is("schedule", "warmup"),
    ),
    Fault("the proximal term is left out", Proximal, "step", _no_clip, _is("algorithm", "fedprox")),
    Fault(
        "SCAFFOLD's server moves as if all reported",
        ScaffoldAveraging,
        "step",
        _scaffold_share,
        _is("algorithm", "scaffold"),
    ),
    Fault(
        "SCAFFOLD's clients keep their old control",
        ControlVariates,
        "report",
        _keeps_old_control,
        _is("algorithm", "scaffold"),
    ),
    Fault(
        "EASGD's force is taken after the step",
        ElasticForce,
        "step",
        _force_after_step,
        _is("algorithm", "easgd"),
    ),
    Fault(
        "EASGD moves by the mean force",
        ElasticAveraging,
        "step",
        lambda right: (
            lambda self, params, aggregate, state: right(
                self, params, replace(aggregate, num_clients=1), state
            )
        ),
        _is("algorithm", "easgd"),
    ),
    Fault(
        "the server forgets its velocity",
        ServerSgd,
        "step",
        _server_step(
            lambda right, self, params, delta, state: right(
                self, params, delta, {k: torch.zeros_like(v) for k, v in state.items()}
            )
        ),
        _is("algorithm", "fedavgm"),
    ),
    Fault(
        "second moments begin at zero",
        ServerAdaptive,
        "init",
        lambda right: (
            lambda self, params: {
                name: torch.zeros_like(value) for name, value in right(self, params).items()
            }
        ),
        _is("algorithm", "fedadam", "fedyogi", "fedadagrad"),
    ),
    Fault(
        "Yogi is Adam",
        ServerAdaptive,
        "_second",
        lambda right: (
            lambda self, moment, square: right(replace(self, second_moment="adam"), moment, square)
        ),
        _is("algorithm", "fedyogi"),
    ),
    Fault(
        "the median of an even number is the lower one",
        CoordinateMedian,
        "combine",
        _lower_median,
        _is("algorithm", "median"),
    ),
    Fault(
        "stale updates count as new ones",
        Staleness,
        "weights",
        _constant(lambda _, staleness_B: np.ones(len(staleness_B))),
        _stale,
    ),
    Fault("stale updates count twice", Staleness, "weights", _counts_stale_twice, _stale),
    Fault(
        "a mean takes staleness out again",
        RoundState,
        "damp",
        _constant(lambda _, aggregate, *__, **___: aggregate),
        _stale,
    ),
    Fault(
        "a resumed run forgets what clients keep",
        rounds_run,
        "_restore",
        _resume_forgets("client_states"),
        lambda c: c.interrupted != "no" and _keeps(c),
    ),
    Fault(
        "a resumed run forgets the server's state",
        rounds_run,
        "_restore",
        _resume_forgets("strategy_state"),
        lambda c: c.interrupted != "no" and c.algorithm == "fedavgm",
    ),
    Fault(
        "the bound on norms is ignored",
        reduction,
        "refusal",
        lambda right: lambda *given, **named: right(*given, **{**named, "bounds": None}),
        lambda c: c.bound == "norm" and c.place in ("vmap", "fused"),
    ),
    Fault(
        "the bound on examples is ignored",
        engine.Engine,
        "bounds",
        lambda right: (
            lambda self, request: (
                bounds and replace(bounds, max_examples=10**8)
                if (bounds := right(self, request))
                else None
            )
        ),
        _is("bound", "examples"),
    ),
    Fault("statistics stay", server_optimizers, "_apply", _statistics_stay, _is("norm", "batch")),
    Fault(
        "a short last batch is not left out",
        local.LocalWork,
        "count_used_per_epoch",
        _constant(lambda _, num_examples: num_examples),
        _is("drop_last", True),
    ),
    Fault(
        "a sum with noise is divided by the number of reports",
        NoisyMean,
        "__call__",
        _divides_by_reports,
        _is("privacy", "central"),
    ),
    Fault(
        "a sum with noise is of updates that are not clipped",
        bounded_sum,
        "norms",
        lambda right: lambda rows: 0.0 * right(rows),
        _is("privacy", "central"),
    ),
    Fault(
        "gradients of examples are not clipped",
        NoisedGradients,
        "clip",
        _examples_unclipped,
        _is("privacy", "example"),
    ),
    Fault(
        "a sum has half its noise",
        DiscreteGaussianNoise,
        "draw",
        lambda right: (
            lambda self, sigma, size, *, labels: right(self, sigma / 2, size, labels=labels)
        ),
        _is("privacy", "central", "adaptive", "banded"),
    ),
    Fault(
        "a simulated secure sum has one client's noise",
        DistributedMean,
        "_add_simulated_noise",
        lambda right: lambda self, lane, levels, _, labels: right(self, lane, levels, 1, labels),
        lambda c: c.privacy == "distributed" and c.secure == "modular_sum",
    ),
    Fault(
        "a client's share of the noise counts on those that collude",
        SecurePlan,
        "num_noisy",
        _constant(property(lambda self: self.min_survivors)),
        _is("privacy", "distributed"),
    ),
    Fault(
        "an update has half its noise",
        NoisedUpdates,
        "__call__",
        lambda right: (
            lambda self, updates: right(
                replace(self, noise_multiplier=self.noise_multiplier / 2), updates
            )
        ),
        _is("privacy", "local"),
    ),
    Fault(
        "a step has half its noise",
        NoisedGradients,
        "sensitivity",
        lambda right: lambda self, **sizes: right(self, **sizes) / 2,
        _is("privacy", "example"),
    ),
    Fault(
        "the clip norm moves away from its quantile",
        AdaptiveClip,
        "next_norm",
        lambda right: (
            lambda self, clip_norm, *, share: right(
                self, clip_norm, share=2 * self.quantile - share
            )
        ),
        _is("privacy", "adaptive"),
    ),
    Fault(
        "the next round takes no noise back",
        banded_noise,
        "_skip_turns",
        _constant(lambda past, _: torch.zeros_like(past)),
        _is("privacy", "banded"),
    ),
    Fault(
        "the loss of a batch is a mean over examples",
        CrossEntropy,
        "mean_loss",
        _mean_of_examples,
        _is("objective", "weighted", "ignored"),
    ),
    Fault(
        "every epoch reads the same augmentation",
        UnreadRows,
        "read_epochs",
        _first_epoch_alone,
        lambda c: c.augmented and c.epochs > 1 and c.place not in SESSIONS,
    ),
    Fault(
        "labels are not smoothed",
        CrossEntropy,
        "__post_init__",
        _unsmoothed,
        _is("objective", "label_smoothing"),
    ),
    Fault(
        "a Flower node forgets what its client keeps",
        node,
        "open_node_store",
        _keeps_nothing,
        lambda c: c.place == "flower" and _keeps(c),
    ),
    Fault(
        "a client of a gateway forgets what it keeps",
        Home,
        "load_state",
        _constant(lambda *_: b""),
        lambda c: c.place == "grpc" and _keeps(c),
    ),
    Fault(
        "a compiled step counts what pads a batch",
        TracedSteps,
        "__call__",
        _counts_padding,
        _is("place", "compiled"),
    ),
    Fault("losses of clients count alike", Participations, "mean_loss", _loss_by_clients),
    Fault(
        "the worst tenth is the best",
        evaluation,
        "summarize_metrics",
        _best_tenth,
        lambda c: c.evaluated_clients != "none",
    ),
    Fault(
        "a round takes one report too many",
        CohortRoundState,
        "take",
        _one_more,
        _is("stragglers", "oversample"),
    ),
    Fault(
        "every epoch visits in one order",
        schedule,
        "_orders",
        _same_order_each_epoch,
        lambda c: c.shuffle and c.epochs > 1,
    ),
    Fault(
        "what each client does by itself is ignored",
        PerClient,
        "locals_for",
        lambda _: lambda self, client_ids: [self.inner.local] * len(client_ids),
        _is("own", "locals"),
    ),
    Fault(
        "devices are those of the round before",
        engine.Engine,
        "describe_work",
        _first_attempt,
        lambda c: c.devices != "ideal",
    ),
    Fault(
        "what the client kept is not loaded",
        fused_executor,
        "load_client_state",
        _loads_nothing,
        lambda c: c.place == "fused" and _keeps(c),
    ),
)
