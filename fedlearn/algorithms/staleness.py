r"""Weights of stale updates, which were trained from an older model than the newest.

The staleness :math:`s` of an update is the index of the round that takes the update, minus that of
the round it is based on. Rounds that were skipped in between count.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
from annotated_types import doc
from numpy.typing import NDArray

from fedlearn.core.ranges import NotNegative, Ranged, Whole

#: Smallest weight allowed. Below it, the weighted mean could divide by zero in float32, whose
#: smallest normal number is about 1e-38 and which must also hold products of weights and values.
_LEAST_WEIGHT = 1e-30


class StalenessWeight(StrEnum):
    """The function that maps an update's staleness to its weight.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> algorithm = fl.FedBuff(
        ...     local, buffer_size=5, concurrency=5, max_staleness=9, staleness_exponent=1.0,
        ...     staleness_weight=fl.StalenessWeight.HINGE, staleness_hinge=2,
        ... )
        >>> algorithm.asynchrony.weights(np.array([0, 2, 3]))  # by staleness
        array([1. , 1. , 0.5])
    """

    CONSTANT = "constant"
    POLYNOMIAL = "polynomial"
    HINGE = "hinge"


@dataclass(frozen=True, kw_only=True)
class Staleness(Ranged):
    r"""A rule that lowers the weight of stale updates, and drops those beyond a bound.

    With exponent :math:`a` and hinge :math:`b`, the weight is 1 (constant), :math:`(1 + s)^{-a}`
    (polynomial), or 1 up to :math:`b` and :math:`1 / (a (s - b) + 1)` beyond (hinge).

    Raises:
        ValueError: A number is out of range, or the stalest updates would weigh less than 1e-30.

    Example:
        >>> rule = Staleness(max_staleness=9, staleness_weight=StalenessWeight.POLYNOMIAL,
        ...                  staleness_exponent=0.5, staleness_hinge=4)
        >>> rule.weights(np.array([0, 3])).tolist()
        [1.0, 0.5]

    References:
        Xie, Koyejo and Gupta, 2019, `Asynchronous Federated Optimization
        <https://arxiv.org/abs/1903.03934>`_, section 5.2.
    """

    max_staleness: Annotated[
        Whole,
        doc(
            "Rounds that an update may be older than the newest model, >= 0; an older one is "
            "dropped, and recorded as stale."
        ),
    ]
    staleness_weight: Annotated[
        StalenessWeight,
        doc("How weights fall with staleness: not at all, polynomially, or beyond a hinge."),
    ]
    staleness_exponent: Annotated[
        NotNegative, doc("Exponent of the polynomial weight, or slope beyond the hinge, >= 0.")
    ]
    staleness_hinge: Annotated[
        Whole, doc("Staleness up to which the hinge gives all updates the same weight, >= 0.")
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        (least,) = self.weights(np.array([self.max_staleness])).tolist()
        if least < _LEAST_WEIGHT:
            raise ValueError(
                f"staleness_exponent is {self.staleness_exponent:g}, but with max_staleness "
                f"{self.max_staleness} an update may weigh {least:.1e}, below {_LEAST_WEIGHT:g}, "
                "too little for a mean; lower one of the two"
            )

    def weights(self, staleness_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights of B updates by their staleness, in [1e-30, 1]: shape [B]."""
        a, late_B = self.staleness_exponent, staleness_B.astype(np.float64)
        match self.staleness_weight:
            case StalenessWeight.CONSTANT:
                return np.ones_like(late_B)
            case StalenessWeight.POLYNOMIAL:
                return (1.0 + late_B) ** -a
            case StalenessWeight.HINGE:
                # 1 / (a (s - b) + 1), and 1 up to the hinge.
                beyond_B = np.maximum(0.0, late_B - self.staleness_hinge)
                return 1.0 / (a * beyond_B + 1.0)

    def why_stale(self, staleness: int) -> str:
        """Return the recorded reason for dropping an update of this staleness."""
        return f"based on a model {staleness} rounds old; at most {self.max_staleness} are accepted"
