r"""Attacks by some of the clients of a simulation: on their own data, or on the updates they send.

An attacker trains like the others. An attack may change its examples beforehand
(:meth:`Attack.poison`) and the updates of all attackers of a round afterwards
(:meth:`Attack.forge`), so that they can collude.

====================  ====================================================================
Paper                 Here
====================  ====================================================================
:math:`n, m`          ``num_updates`` and the number of attackers in a round
:math:`\mu, \sigma`   mean and standard deviation of the attackers' honest updates
:math:`z`             ``num_deviations``
:math:`\gamma`        largest step along ``direction`` that no distance gives away
====================  ====================================================================
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le, doc
from torch import Tensor

from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count, Positive, Ranged, Whole


class Attack(Ranged):
    """Base of attacks: a frozen dataclass that overrides one method or both.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> import fedlearn as fl
        >>> @dataclass(frozen=True)
        ... class SendNothing(fl.Attack):
        ...     forges = True
        ...     def forge(self, deltas_MQ, *, num_updates, seed):
        ...         return torch.zeros_like(deltas_MQ)
        >>> SendNothing().forge(torch.ones(2, 3), num_updates=10, seed=fl.Seed(0)).sum()
        tensor(0.)
    """

    #: Whether :meth:`poison` or :meth:`forge` is overridden.
    poisons: ClassVar[bool] = False
    forges: ClassVar[bool] = False

    def poison(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        num_classes: int,  # noqa: ARG002 - for attacks that need it
        seed: Seed,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Return the examples that an attacker trains on; must not write to its own.

        Args:
            features: Features of one attacker's examples: [N, *F].
            labels: Their classes: int64 [N].
            num_classes: Number of classes.
            seed: Seed of this attacker.
        """
        return features, labels

    def forge(
        self,
        deltas_MQ: Tensor,
        *,
        num_updates: int,  # noqa: ARG002 - as above
        seed: Seed,  # noqa: ARG002
    ) -> Tensor:
        """Return the deltas that the attackers send; must not write to the trained ones.

        Args:
            deltas_MQ: Trainable part of what the attackers of the round have trained: [M, Q].
            num_updates: Number of all updates in the round, n.
            seed: Seed of this round.
        """
        return deltas_MQ


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Sends the negative of the trained update, perhaps enlarged.

    Example:
        >>> import fedlearn as fl
        >>> fl.SignFlip(scale=2.0).forge(torch.ones(1, 2), num_updates=5, seed=fl.Seed(0))
        tensor([[-2., -2.]])

    References:
        Li et al., 2019, `RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed
        Learning from Heterogeneous Datasets <https://arxiv.org/abs/1811.03761>`_, section 5.
    """

    forges = True

    scale: Annotated[Positive, doc("Factor of the negative update, > 0.")] = 1.0

    def forge(self, deltas_MQ: Tensor, *, num_updates: int, seed: Seed) -> Tensor:  # noqa: ARG002
        """Return the negative deltas."""
        return -self.scale * deltas_MQ


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Attack):
    """Sends independent Gaussian noise in place of the trained update.

    Example:
        >>> import fedlearn as fl
        >>> fl.GaussianNoise(noise_std=1.0).forge(
        ...     torch.ones(2, 3), num_updates=5, seed=fl.Seed(0)
        ... ).shape
        torch.Size([2, 3])

    References:
        Blanchard et al., 2017, `Machine Learning with Adversaries: Byzantine Tolerant Gradient
        Descent <https://arxiv.org/abs/1703.02757>`_, section 5.
    """

    forges = True

    noise_std: Annotated[Positive, doc("Standard deviation of each number, > 0.")]

    def forge(self, deltas_MQ: Tensor, *, num_updates: int, seed: Seed) -> Tensor:  # noqa: ARG002
        """Return noise."""
        noise = torch.randn(deltas_MQ.shape, generator=seed.torch(), dtype=deltas_MQ.dtype)
        return self.noise_std * noise.to(deltas_MQ)


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Trains on labels that are turned around: class c becomes C - 1 - c.

    Example:
        >>> import fedlearn as fl
        >>> labels = torch.tensor([0, 1, 9])
        >>> fl.LabelFlip().poison(torch.ones(3, 2), labels, num_classes=10, seed=fl.Seed(0))[1]
        tensor([9, 8, 0])

    References:
        Fang et al., 2020, `Local Model Poisoning Attacks to Byzantine-Robust Federated Learning
        <https://arxiv.org/abs/1911.11815>`_, section 4.1.
    """

    poisons = True

    def poison(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        seed: Seed,  # noqa: ARG002 - as above
    ) -> tuple[Tensor, Tensor]:
        """Return the same features with flipped labels."""
        return features, num_classes - 1 - labels


@dataclass(frozen=True, kw_only=True)
class ModelReplacement(LabelFlip):
    """Trains on flipped labels, and enlarges the update so that it outweighs the others.

    With a scale of the number of updates in a round, the mean becomes the attacker's model.

    Example:
        >>> import fedlearn as fl
        >>> fl.ModelReplacement(scale=5.0).forge(torch.ones(1, 2), num_updates=5, seed=fl.Seed(0))
        tensor([[5., 5.]])

    References:
        Bagdasaryan et al., 2020, `How To Backdoor Federated Learning
        <https://arxiv.org/abs/1807.00459>`_, equation 3.
    """

    forges = True

    scale: Annotated[Positive, doc("Factor of the update, > 0.")] = 10.0

    def forge(self, deltas_MQ: Tensor, *, num_updates: int, seed: Seed) -> Tensor:  # noqa: ARG002
        """Return the enlarged deltas."""
        return self.scale * deltas_MQ


@dataclass(frozen=True, kw_only=True)
class Backdoor(Attack):
    """Trains the model to see a target class wherever a trigger is in the features.

    The trigger is a square in the last corner of images, or the last features of vectors.

    Example:
        >>> import fedlearn as fl
        >>> fl.Backdoor(target_label=0, trigger_size=1).stamp(torch.zeros(1, 2, 2))
        tensor([[[0., 0.],
                 [0., 1.]]])

    References:
        Gu, Dolan-Gavitt and Garg, 2017, `BadNets: Identifying Vulnerabilities in the Machine
        Learning Model Supply Chain <https://arxiv.org/abs/1708.06733>`_, section 4; with a scale,
        Bagdasaryan et al., 2020, `How To Backdoor Federated Learning
        <https://arxiv.org/abs/1807.00459>`_.
    """

    poisons = True
    forges = True

    target_label: Annotated[Whole, doc("Class that the model is to see, >= 0.")]
    trigger_size: Annotated[Count, doc("Side of the square, or number of features, >= 1.")] = 2
    trigger_value: Annotated[float, doc("Value of the features in the trigger.")] = 1.0
    poisoned_share: Annotated[
        float, Ge(0), Le(1), doc("Share of an attacker's examples with the trigger, 0 to 1.")
    ] = 0.5
    scale: Annotated[Positive, doc("Factor of the update, > 0.")] = 1.0

    def stamp(self, features: Tensor) -> Tensor:
        """Return copies of the features with the trigger: [N, *F]."""
        stamped, size = features.clone(), self.trigger_size
        is_vector = features[0].dim() == 1
        corner = stamped[..., -size:] if is_vector else stamped[..., -size:, -size:]
        corner.fill_(self.trigger_value)
        return stamped

    def poison(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        seed: Seed,
    ) -> tuple[Tensor, Tensor]:
        """Return the examples, some of them with the trigger and the target label."""
        if self.target_label >= num_classes:
            raise ValueError(
                f"target_label is {self.target_label}, but there are {num_classes} classes; give a "
                "lower one"
            )
        order = torch.randperm(len(labels), generator=seed.torch())
        rows = order[: math.ceil(self.poisoned_share * len(labels))]
        features, labels = features.clone(), labels.clone()
        features[rows], labels[rows] = self.stamp(features[rows]), self.target_label
        return features, labels

    def forge(self, deltas_MQ: Tensor, *, num_updates: int, seed: Seed) -> Tensor:  # noqa: ARG002
        """Return the enlarged deltas."""
        return self.scale * deltas_MQ


@dataclass(frozen=True, kw_only=True)
class LittleIsEnough(Attack):
    r"""All attackers send :math:`\mu - z \sigma`, which is still within the honest updates.

    Without ``num_deviations``, z is the largest with which the attackers and some honest clients
    are still a majority: :math:`\Phi(z) = (n - m - s) / (n - m)`,
    :math:`s = \lfloor n/2 + 1 \rfloor - m`. A single attacker knows no deviation, so it sends its
    own update.

    Example:
        >>> import fedlearn as fl
        >>> deltas = torch.tensor([[0.0], [2.0]])
        >>> fl.LittleIsEnough(num_deviations=1.0).forge(deltas, num_updates=9, seed=fl.Seed(0))
        tensor([[0.],
                [0.]])

    References:
        Baruch, Baruch and Goldberg, 2019, `A Little Is Enough: Circumventing Defenses For
        Distributed Learning <https://arxiv.org/abs/1902.06156>`_, algorithm 3.
    """

    forges = True

    num_deviations: Annotated[
        Positive | None, doc("z, > 0; not set: by the number of attackers in the round.")
    ] = None

    def forge(self, deltas_MQ: Tensor, *, num_updates: int, seed: Seed) -> Tensor:  # noqa: ARG002
        """Return the same delta for all attackers."""
        z = self.num_deviations
        if z is None:
            z = max_deviations(num_updates, len(deltas_MQ))
        std, mean = torch.std_mean(deltas_MQ, dim=0, correction=0)
        return (mean - z * std).expand_as(deltas_MQ)


def max_deviations(num_updates: int, num_attackers: int) -> float:
    """Return z of "a little is enough" for n updates, m of them of attackers, at least 0.

    Example:
        >>> round(max_deviations(50, 24), 2)
        1.43
    """
    num_honest = num_updates - num_attackers
    num_supporters = max(1, num_updates // 2 + 1 - num_attackers)
    if num_honest <= num_supporters:
        return 0.0
    return max(0.0, NormalDist().inv_cdf((num_honest - num_supporters) / num_honest))


class Direction(StrEnum):
    """Where :class:`MinMax` moves its updates to, relative to the honest ones."""

    STD = "std"
    UNIT = "unit"
    SIGN = "sign"


@dataclass(frozen=True, kw_only=True)
class MinMax(Attack):
    r"""All attackers send :math:`\mu + \gamma p`, no farther from the others than these are apart.

    :math:`\gamma` is the largest number with :math:`\max_i \|\mu + \gamma p - x_i\| \le
    \max_{i,j} \|x_i - x_j\|` over the attackers' honest updates x. The direction p is
    :math:`-\sigma`, :math:`-\mu / \|\mu\|` or :math:`-\operatorname{sign}(\mu)`. A single attacker
    knows no distance, so it sends its own update.

    Example:
        >>> import fedlearn as fl
        >>> deltas = torch.tensor([[0.0], [2.0]])
        >>> fl.MinMax().forge(deltas, num_updates=9, seed=fl.Seed(0))  # 2 from the farthest
        tensor([[0.],
                [0.]])

    References:
        Shejwalkar and Houmansadr, 2021, `Manipulating the Byzantine: Optimizing Model Poisoning
        Attacks and Defenses for Federated Learning
        <https://doi.org/10.14722/ndss.2021.24498>`_, section 4.
    """

    forges = True

    direction: Annotated[
        Direction, doc('Away from the mean along "std", "unit" or "sign" of the mean.')
    ] = Direction.STD

    def forge(self, deltas_MQ: Tensor, *, num_updates: int, seed: Seed) -> Tensor:  # noqa: ARG002
        """Return the same delta for all attackers."""
        x = deltas_MQ.double()
        std, mean = torch.std_mean(x, dim=0, correction=0)
        away = {
            Direction.STD: -std,
            Direction.UNIT: -mean / mean.norm().clamp(min=1e-30),
            Direction.SIGN: -mean.sign(),
        }[Direction(self.direction)]
        farthest = float(torch.pdist(x).max()) if len(x) > 1 else 0.0
        # |mean + g p - x_i|^2 is a parabola in g: the first to reach the limit ends the step.
        a, offsets = float(away @ away), mean - x
        if a == 0.0:
            return mean.to(deltas_MQ).expand_as(deltas_MQ)
        b, c = offsets @ away, (offsets**2).sum(dim=1) - farthest**2
        steps = (-b + (b**2 - a * c).clamp(min=0.0).sqrt()) / a
        forged: Tensor = (mean + float(steps.min()) * away).to(deltas_MQ)
        return forged.expand_as(deltas_MQ)


#: The attacks by their names in a configuration.
ATTACK_KINDS: Mapping[str, type[Attack]] = {
    "sign_flip": SignFlip,
    "gaussian": GaussianNoise,
    "label_flip": LabelFlip,
    "model_replacement": ModelReplacement,
    "backdoor": Backdoor,
    "little_is_enough": LittleIsEnough,
    "min_max": MinMax,
}
