"""Weights of stale updates, and algorithms that cannot be asynchronous."""

import numpy as np
import pytest

from fedlearn.algorithms.asynchronous import Asynchrony, Buffered, require_asynchronous
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAsync, FedAvg, FedBuff, Scaffold
from fedlearn.algorithms.staleness import Staleness, StalenessWeight
from fedlearn.algorithms.strategy import StrategyWrapper

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


@pytest.mark.parametrize(
    ("weight", "exponent", "hinge", "expected"),
    [
        ("constant", 0.5, 4, [1.0, 1.0, 1.0, 1.0]),
        ("polynomial", 0.5, 4, [1.0, 2**-0.5, 6**-0.5, 9**-0.5]),
        ("polynomial", 0.0, 4, [1.0, 1.0, 1.0, 1.0]),
        ("hinge", 10.0, 4, [1.0, 1.0, 1 / 11, 1 / 41]),
    ],
)
def test_weights_are_those_of_the_paper(
    weight: str, exponent: float, hinge: int, expected: list[float]
) -> None:
    """For staleness 0, 1, 5 and 8."""
    rule = Staleness(
        max_staleness=9,
        staleness_weight=StalenessWeight(weight),
        staleness_exponent=exponent,
        staleness_hinge=hinge,
    )
    assert rule.weights(np.array([0, 1, 5, 8])).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("weight", ["polynomial", "hinge"])
def test_an_update_that_would_count_for_nothing_is_refused_beforehand(weight: str) -> None:
    """A mean would divide by almost zero. A lower max_staleness makes the same weight valid."""

    def rule(*, exponent: float, max_staleness: int) -> Staleness:
        return Staleness(
            max_staleness=max_staleness,
            staleness_weight=StalenessWeight(weight),
            staleness_exponent=exponent,
            staleness_hinge=0,
        )

    steep = {"polynomial": 30.0, "hinge": 1e29}[weight]
    with pytest.raises(ValueError, match=r"^staleness_exponent is .* with max_staleness 20 an upd"):
        rule(exponent=steep, max_staleness=20)
    assert rule(exponent=steep, max_staleness=1).weights(np.array([1])) >= 1e-30


def test_fedasync_is_fedbuff_with_a_buffer_of_one() -> None:
    """Both have the same asynchrony and the same server step."""
    one = FedAsync(SGD, mixing=0.6, concurrency=5, max_staleness=9)
    other = FedBuff(SGD, buffer_size=1, concurrency=5, max_staleness=9, server_learning_rate=0.6)
    assert one == other


def test_what_is_told_by_the_model_of_a_round_cannot_be_asynchronous() -> None:
    """SCAFFOLD is refused, also inside a wrapper. Control: FedAvg is accepted."""
    scaffold = Scaffold(SGD, num_clients=4, server_learning_rate=1.0)
    limits = FedBuff(SGD, buffer_size=1, concurrency=1, max_staleness=0).asynchrony
    assert isinstance(limits, Asynchrony)
    for refused in (scaffold, StrategyWrapper(scaffold)):
        with pytest.raises(
            ValueError,
            match=r"ScaffoldAveraging cannot be asynchronous: the server's control variate",
        ):
            Buffered(refused, limits)
    require_asynchronous(FedAvg(SGD))
