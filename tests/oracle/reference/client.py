r"""One client's part in a round.

======================= ======================================================================
symbol                  here
======================= ======================================================================
:math:`x_0, x`          the global model that the client received, and its own: ``x_0``, ``x``
:math:`g`               gradient of the mean loss of a batch, by parameter: ``g``
:math:`\eta`            ``ETA``, times the factor of the schedule
:math:`\mu`             FedProx: ``MU``
:math:`c, c_i, K`       SCAFFOLD: ``broadcast["control"]``, ``memory["control"]``, ``num_steps``
:math:`\rho, W_i`       EASGD: ``RHO`` and ``memory["own_model"]``
:math:`m, v, t`         Adam: ``first_moment``, ``second_moment``, ``num_steps``
======================= ======================================================================

A step consists of, in this order: proximal term, control variates, gradient clipping, weight
decay (or decoupled decay, of AdamW), momentum or moments, and the step at the scheduled rate. A
parameter without a gradient in a step is left out of all of these.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tests.oracle.configuration import Configuration
from tests.oracle.reference.model import Model, Tensors, clip, norm
from tests.oracle.reference.privacy import (
    NOISE_MULTIPLIER,
    PRIVATE_NORM,
    RecordedNoise,
    flat,
    noised,
    share,
)
from tests.oracle.workloads import Inputs

ETA, BETA, MU, RHO = 0.2, 0.8, 0.7, 0.4
ADAM_ETA, BETA_1, BETA_2, EPSILON = 0.05, 0.8, 0.95, 0.01
DECAY, COSINE_ROUNDS, WARMUP_STEPS = 0.5, 4, 3
#: Norms to which secure aggregation clips an update, and the statistics in it.
SECURE_NORM, STATISTICS_NORM = 0.3, 10.0
#: The user's local update divides each tensor's gradient by its norm plus this.
OWN_FLOOR = 0.3

#: State of a client or the server: by name, then by parameter.
Memory: TypeAlias = dict[str, Tensors]
Batch: TypeAlias = tuple[Inputs, Tensor]

#: State of each optimizer; one whose name ends in "_kept" keeps it from round to round.
MOMENTS = ("first_moment", "second_moment", "num_steps")
REMEMBERED = {"sgd": (), "momentum": ("velocity",), "adam": MOMENTS, "adamw": MOMENTS}


@dataclass(frozen=True)
class Task:
    """A client's request and its stored state.

    Attributes:
        x_0: The global model of the round ``round_num``.
        broadcast: What the algorithm sends along with the model.
        kept: The client's state after its previous round.
        noise: The noise of the run.
    """

    c: Configuration
    client_id: int
    model: Model
    x_0: Tensors
    broadcast: Memory
    round_num: int
    kept: Memory
    num_examples: int
    noise: RecordedNoise


@dataclass(frozen=True)
class Contribution:
    """A client's reply and its new state.

    Attributes:
        delta: Local minus global: trained parameters and statistics.
        lanes: Everything else that the algorithm has clients send.
        loss: Mean training loss over the examples of all steps.
        is_scaled_down: Whether secure aggregation, or without it the clip, scales the update down.
        trained_norm: Norm of the delta without the statistics, before secure aggregation.
    """

    delta: Tensors
    lanes: Memory
    num_examples: int
    num_steps: int
    loss: float
    kept: Memory
    is_scaled_down: bool
    trained_norm: float


def train(task: Task, batches: Iterable[Batch]) -> Contribution:
    """Train for a round, without changing the task.

    Raises:
        ValueError: torch cannot train on a batch, as BatchNorm on a single example.
    """
    x = {name: value.clone() for name, value in task.x_0.items()}
    memory = begin(task, x)
    losses, sizes = list[float](), list[int]()
    for step, (features, labels) in enumerate(batches):
        if task.c.privacy == "example":
            loss, g = task.model.clipped_gradients(x, features, labels, PRIVATE_NORM)
            before = torch.cat([flat({name: x[name] for name in g}), flat(g)])
            sigma = NOISE_MULTIPLIER * PRIVATE_NORM / len(labels)
            g = noised(g, task.noise.of_client(task.client_id, task.round_num, before), sigma)
        else:
            loss, g = task.model.gradients(x, features, labels)
        losses.append(loss)
        sizes.append(len(labels))
        g = direction(task, x, g, memory)
        descend(task.c, x, g, memory, factor=schedule(task.c, task.round_num, step))
        if task.c.algorithm == "easgd" and step == 0:
            for name, force in memory["force"].items():
                x[name] -= force  # by the distance before the step
    sent, lanes = report(task, x, memory, num_steps=len(losses))
    delta = delta_of(task, sent)
    is_secure = task.c.secure != "off"
    return Contribution(
        delta=summand(task, delta) if is_secure else delta,
        lanes=lanes,
        num_examples=task.num_examples,
        num_steps=len(losses),
        loss=sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes),
        kept={name: memory[name] for name in names_kept(task.c)},
        is_scaled_down=(
            norm(delta) > norm(clip_to_bounds(task, delta)) if is_secure else is_clipped(task, sent)
        ),
        trained_norm=norm(select_trained(task, delta)),
    )


def begin(task: Task, x: Tensors) -> Memory:
    """Return the memory before the first step: the stored state, or zeros."""
    c, trained = task.c, task.model.trained

    def zeros() -> Tensors:
        return {name: torch.zeros_like(x[name]) for name in trained}

    memory = {each: zeros() for each in REMEMBERED[c.optimizer.removesuffix("_kept")]}
    if c.algorithm == "scaffold":
        memory["control"] = zeros()
        memory["num_gradients"] = {name: torch.zeros((), dtype=torch.float64) for name in trained}
    if c.algorithm == "easgd":  # in a client's first round its own model is the global one
        memory["own_model"] = {name: x[name] for name in trained}
    memory = {each: _copy(values) for each, values in (memory | task.kept).items()}
    if c.algorithm == "easgd":
        own = memory["own_model"]
        memory["force"] = {name: ETA * RHO * (own[name] - x[name]) for name in trained}
        x.update(_copy(own))
    return memory


def direction(task: Task, x: Tensors, g: Tensors, memory: Memory) -> Tensors:
    """Return the gradients that the optimizer receives."""
    c = task.c
    if c.algorithm == "fedprox":
        g = {name: value + MU * (x[name] - task.x_0[name]) for name, value in g.items()}
    if c.algorithm == "scaffold":
        for name in g:
            memory["num_gradients"][name] += 1
        c_i, c_server = memory["control"], task.broadcast["control"]
        g = {name: value - c_i[name] + c_server[name] for name, value in g.items()}
    return clip(g, c.gradient_clip) if c.gradient_clip else g


def schedule(c: Configuration, round_num: int, step: int) -> float:
    """Return the factor of the learning rate."""
    if c.schedule == "decay":
        return DECAY**round_num
    if c.schedule == "cosine":
        return (1 + math.cos(math.pi * min(round_num, COSINE_ROUNDS) / COSINE_ROUNDS)) / 2
    if c.schedule == "warmup":
        return min(1.0, (step + 1) / WARMUP_STEPS)
    return 1.0


def descend(c: Configuration, x: Tensors, g: Tensors, memory: Memory, *, factor: float) -> None:
    """Take one step of the client's optimizer, in place."""
    optimizer = c.optimizer.removesuffix("_kept")
    eta = factor * (ADAM_ETA if optimizer in ("adam", "adamw") else ETA)
    for name, gradient in g.items():
        if c.own in ("update", "strategy"):
            x[name] -= eta * gradient / (gradient.norm() + OWN_FLOOR)
        elif optimizer == "sgd":
            x[name] -= eta * (gradient + c.weight_decay * x[name])
        elif optimizer == "momentum":
            velocity = memory["velocity"][name]
            velocity.mul_(BETA).add_(gradient + c.weight_decay * x[name])
            x[name] -= eta * velocity
        else:
            m, v, t = (memory[each][name] for each in MOMENTS)
            if optimizer == "adamw":
                x[name] *= 1 - eta * c.weight_decay
            else:
                gradient = gradient + c.weight_decay * x[name]  # noqa: PLW2901 - as in the paper
            m.mul_(BETA_1).add_((1 - BETA_1) * gradient)
            v.mul_(BETA_2).add_((1 - BETA_2) * gradient**2)
            t += 1
            m_hat, v_hat = m / (1 - BETA_1**t), v / (1 - BETA_2**t)
            x[name] -= eta * m_hat / (v_hat.sqrt() + EPSILON)


def weigh_gradients(c: Configuration, num_steps: int) -> list[float]:
    """Return how far each gradient of a round moves the model, in learning rates."""
    beta = BETA if c.optimizer == "momentum" else 0.0
    return [sum(beta**later for later in range(num_steps - step)) for step in range(num_steps)]


def report(task: Task, x: Tensors, memory: Memory, *, num_steps: int) -> tuple[Tensors, Memory]:
    """Return the model and the lanes to send; update the memory."""
    c, x_0, trained = task.c, task.x_0, task.model.trained
    sent, lanes = dict(x), Memory()
    if c.algorithm == "scaffold":
        # Option II: c_i+ = c_i - c + (x_0 - x) / (K eta). A parameter without a gradient in some of
        # the K steps counts as having a zero gradient there.
        c_i, c_server = memory["control"], task.broadcast["control"]
        for name in trained:
            weight = sum(weigh_gradients(c, num_steps))
            moved = (x_0[name] - x[name]) / (weight * ETA)
            own_weight = sum(weigh_gradients(c, int(memory["num_gradients"][name])))
            missed = 1 - own_weight / weight
            change = moved - c_server[name] + missed * (c_server[name] - c_i[name])
            lanes.setdefault("control", {})[name] = change
            c_i[name] = c_i[name] + change
    if c.algorithm == "easgd":
        memory["own_model"] = {name: x[name] for name in trained}
        sent |= {name: x_0[name] + memory["force"][name] for name in trained}
    if c.own == "strategy":  # FedNova: the mean step, and the number of steps
        sent |= {name: x_0[name] + (x[name] - x_0[name]) / num_steps for name in trained}
        lanes["tau"] = {"": torch.tensor(float(num_steps), dtype=torch.float64)}
    return sent, lanes


def delta_of(task: Task, sent: Tensors) -> Tensors:
    """Return local minus global, after the transforms."""
    names = [*task.model.trained, *task.model.statistics]
    delta = {name: sent[name] - task.x_0[name] for name in names}
    if task.c.update_clip:  # statistics are averaged as values, and not clipped
        delta |= clip(select_trained(task, delta), task.c.update_clip)
    if task.c.own == "transform":
        delta = {name: value / 2 for name, value in delta.items()}
    if task.c.privacy == "local":
        noise = task.noise.of_client(task.client_id, task.round_num, flat(delta))
        delta = noised(clip(delta, PRIVATE_NORM), noise, NOISE_MULTIPLIER * PRIVATE_NORM)
    return delta


def is_clipped(task: Task, sent: Tensors) -> bool:
    """Return whether the update clip scales down the client's update."""
    change = {name: sent[name] - task.x_0[name] for name in task.model.trained}
    return 0 < task.c.update_clip < norm(change)


def clip_to_bounds(task: Task, delta: Tensors) -> Tensors:
    """Clip a delta for a secure sum: parameters and statistics have separate bounds."""
    trained = select_trained(task, delta)
    statistics = {name: delta[name] for name in task.model.statistics}
    bound = PRIVATE_NORM if task.c.privacy == "distributed" else SECURE_NORM
    return clip(trained, bound) | clip(statistics, STATISTICS_NORM)


def summand(task: Task, delta: Tensors) -> Tensors:
    """Return a client's summand in a secure sum, including its share of the noise, if any."""
    within = clip_to_bounds(task, delta)
    if task.c.privacy == "distributed":
        noise = task.noise.of_client(task.client_id, task.round_num, flat(within))
        return noised(within, noise, share())
    return within


def names_kept(c: Configuration) -> list[str]:
    """Return the names of the state that a client keeps between rounds."""
    kept = {"scaffold": ["control"], "easgd": ["own_model"]}.get(c.algorithm, [])
    if c.optimizer.endswith("_kept"):
        kept = [*kept, *REMEMBERED[c.optimizer.removesuffix("_kept")]]
    return kept


def select_trained(task: Task, delta: Tensors) -> Tensors:
    """Return the trained part of a delta, without the statistics; norms refer to it."""
    return {name: delta[name] for name in task.model.trained}


def _copy(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}
