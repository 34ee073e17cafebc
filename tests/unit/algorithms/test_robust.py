"""Robust rules agree with float64 references and with Flower, and do what they are for."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.common import NDArrays
from flwr.server.strategy.aggregate import (
    aggregate_bulyan,
    aggregate_krum,
    aggregate_trimmed_avg,
)
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.aggregations import (
    FullAggregation,
    RobustAggregation,
    combine,
    require_weighted_mean,
)
from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.errors import ConfigError, RoundError
from tests import robust_rules as reference

SIZE = 70_000  # more columns than one span
WEIGHTS = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 1.0, 2.0, 2.0, 7.0, 3.0, 1.0])
LAST = torch.randn(SIZE, generator=torch.Generator().manual_seed(9)) * 0.1


def some_rows(count: int = 11, size: int = SIZE) -> Tensor:
    """Updates with a common part, and two far from the others."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, size, generator=generator) + torch.randn(size, generator=generator)
    rows[-2:] *= 50.0
    return rows


def updates(rows: Tensor, *, apart: bool = False, num_trained: int | None = None) -> Updates:
    return Updates(
        client_ids=[ClientId(10 + k) for k in range(len(rows))],
        weights_B=WEIGHTS[: len(rows)],
        lanes={"delta": list(rows) if apart else rows, "control": rows[:, :3] * 2.0},
        based_on=[4] * len(rows),
        num_trained=num_trained,
    )


#: An update that those without an attack are similar to.
SERVER = 0.5 * some_rows()[:9].mean(dim=0)
Rule = tuple[RobustAggregation, Callable[[reference.Rows], reference.Rows]]
RULES: dict[str, Rule] = {
    "trimmed": (
        fl.TrimmedMean(trimmed_share=0.2),
        lambda rows: reference.trimmed_mean(rows, share=0.2),
    ),
    "krum": (
        fl.Krum(num_malicious=2),
        lambda rows: reference.krum(rows, num_malicious=2, num_selected=1),
    ),
    "multi-krum": (
        fl.Krum(num_malicious=2, num_selected=5),
        lambda rows: reference.krum(rows, num_malicious=2, num_selected=5),
    ),
    "bulyan": (
        fl.Bulyan(num_malicious=2),
        lambda rows: reference.bulyan(rows, num_malicious=2),
    ),
    "geometric median": (
        fl.GeometricMedian(by_examples=True, num_iterations=4, smoothing=0.1),
        lambda rows: reference.geometric_median(
            rows, weights=WEIGHTS.double().numpy(), num_iterations=4, smoothing=0.1
        ),
    ),
    "centered clipping": (
        fl.CenteredClipping(clip_radius=300.0, num_iterations=3).after({"delta": LAST}),
        lambda rows: reference.centered_clipping(
            rows, last=LAST.double().numpy(), clip_radius=300.0, num_iterations=3
        ),
    ),
    "fltrust": (
        fl.FLTrust().with_server_delta(SERVER),
        lambda rows: reference.fltrust(rows, server=SERVER.double().numpy()),
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("apart", [False, True], ids=["a matrix", "rows apart"])
def test_a_rule_agrees_with_its_paper_in_float64(name: str, *, apart: bool) -> None:
    """And only reads the rows, which are the memory of the clients' replies."""
    rule, expected = RULES[name]
    rows = some_rows()
    before = rows.clone()
    found = combine(rule, updates(rows, apart=apart)).lanes["delta"]
    np.testing.assert_allclose(found.numpy(), expected(rows.double().numpy()), rtol=0, atol=3e-5)
    assert torch.equal(rows, before)


def test_rules_equal_those_of_flower() -> None:
    """On clients with the same number of examples, which Flower's Multi-Krum counts."""
    rows = some_rows()

    def results() -> list[tuple[NDArrays, int]]:
        return [([row.numpy()], 1) for row in rows]

    pairs = [
        (fl.TrimmedMean(trimmed_share=0.2), aggregate_trimmed_avg(results(), 0.2)),
        (fl.Krum(num_malicious=2), aggregate_krum(results(), 2, 0)),
        (fl.Krum(num_malicious=2, num_selected=5), aggregate_krum(results(), 2, 5)),
        (fl.Bulyan(num_malicious=2), aggregate_bulyan(results(), 2, aggregate_krum, to_keep=0)),
    ]
    for rule, (expected,) in pairs:
        found = combine(rule, updates(rows)).lanes["delta"].numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=str(rule))


NEUTRAL: dict[str, RobustAggregation] = {
    "trimmed": fl.TrimmedMean(trimmed_share=0.0),
    "krum": fl.Krum(num_malicious=0, num_selected=11),
    "bulyan": fl.Bulyan(num_malicious=0),
    "geometric median": fl.GeometricMedian(num_iterations=0, by_examples=False),
    "centered clipping": fl.CenteredClipping(clip_radius=1e9),
    "bucketing": fl.Bucketing(inner=fl.Krum(num_malicious=0, num_selected=11), bucket_size=1),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_rule_that_leaves_nobody_out_is_the_mean(name: str) -> None:
    """In every lane."""
    rows = some_rows(size=50)
    sent = updates(rows)
    sent = Updates(sent.client_ids, torch.ones(11), sent.lanes, sent.based_on)
    found = combine(NEUTRAL[name], sent).lanes
    torch.testing.assert_close(found["delta"], rows.mean(dim=0), rtol=0, atol=1e-5)
    torch.testing.assert_close(found["control"], 2.0 * rows[:, :3].mean(dim=0), rtol=0, atol=2e-5)


def test_fltrust_of_updates_at_one_angle_and_norm_is_the_mean() -> None:
    """As if all clients were honest. Control: one with another norm, or none, is scaled."""
    axes = torch.eye(12)
    rows = axes[0] + axes[1:]
    rule = fl.FLTrust().with_server_delta(2**0.5 * axes[0])
    mean = rows.mean(dim=0)
    torch.testing.assert_close(combine(rule, updates(rows)).lanes["delta"], mean)
    rows[3] *= 100.0
    torch.testing.assert_close(combine(rule, updates(rows)).lanes["delta"], mean)
    rows[3] = 0.0
    found = combine(rule, updates(rows))
    assert found.metrics == {"num_left_out": 1.0}
    torch.testing.assert_close(found.lanes["delta"], rows.sum(dim=0) / 10)


def test_fltrust_does_not_move_if_it_trusts_nobody() -> None:
    """Nor if the server's own update is zero; running statistics have no part in the angle."""
    rows = torch.ones(3, 4)
    for server in (-torch.ones(4), torch.zeros(4)):
        found = combine(fl.FLTrust().with_server_delta(server), updates(rows))
        assert not found.lanes["delta"].any()
        assert found.metrics == {"num_left_out": 3.0}
    server = torch.tensor([1.0, 1.0, -9.0, -9.0])
    found = combine(fl.FLTrust().with_server_delta(server), updates(2 * rows, num_trained=2))
    assert found.lanes["delta"].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_fltrust_without_an_update_of_the_server_says_how_to_use_it() -> None:
    """Such as by a strategy of one's own that calls it directly."""
    with pytest.raises(RoundError, match=r"no update of the server; use it in fl\.simulate"):
        combine(fl.FLTrust(), updates(torch.ones(3, 4)))


def test_the_norm_bound_clips_and_weighs() -> None:
    """It takes blocks, and clips before it adds; without effect it is the weighted mean."""
    rows, layout = some_rows(6, 8), Layout.of(nn.Linear(3, 2))
    for bound in (2.0, 1e9):
        rule = fl.NormBound(by_examples=True, clip_norm=bound)
        state = rule.init([DELTA], layout, device=torch.device("cpu"))
        for block in (slice(0, 2), slice(2, 6)):
            part = Updates([ClientId(0)] * 6, WEIGHTS[block], {"delta": rows[block]}, [0] * 6)
            state = rule.accumulate(state, part)
        clipped = [row * min(1.0, bound / float(row.norm())) for row in rows]
        expected = np.average(torch.stack(clipped).double(), axis=0, weights=WEIGHTS[:6].double())
        np.testing.assert_allclose(rule.finalize(state).lanes["delta"], expected, atol=1e-5)


def test_a_rule_must_define_combine() -> None:
    without_combine = type("Rule", (RobustAggregation,), {})
    with pytest.raises(TypeError, match="combine"):
        without_combine()


ATTACKED: dict[str, RobustAggregation] = {
    "median": fl.CoordinateMedian(),
    "trimmed": fl.TrimmedMean(trimmed_share=0.2),
    "krum": fl.Krum(num_malicious=2),
    "multi-krum": fl.Krum(num_malicious=2, num_selected=5),
    "bulyan": fl.Bulyan(num_malicious=2),
    "geometric median": fl.GeometricMedian(num_iterations=30, by_examples=False),
    "centered clipping": fl.CenteredClipping(clip_radius=2.0, num_iterations=30),
    "bucketing": fl.Bucketing(inner=fl.CoordinateMedian(), bucket_size=2),
    "fltrust": fl.FLTrust().with_server_delta(0.5 * some_rows(size=40)[:9].mean(dim=0)),
}


@pytest.mark.parametrize("name", ATTACKED)
def test_two_of_eleven_that_send_huge_updates_hardly_move_the_aggregate(name: str) -> None:
    """Control: they move the mean by millions."""
    rows = some_rows(size=40)
    honest = rows[:9].mean(dim=0)
    rows[9], rows[10] = 1e7, -3e7
    found = combine(ATTACKED[name], updates(rows)).lanes["delta"]
    assert float((found - honest).norm()) < 12.0
    assert float((rows.mean(dim=0) - honest).norm()) > 1e6


@pytest.mark.parametrize(
    ("rule", "left_out"),
    [
        (fl.Krum(num_malicious=2), 10),
        (fl.Krum(num_malicious=2, num_selected=5), 6),
        (fl.Bulyan(num_malicious=2), 4),
    ],
)
def test_a_rule_that_selects_says_how_many_it_left_out(
    rule: RobustAggregation, left_out: int
) -> None:
    """The figure goes into the round's record."""
    aggregate = combine(rule, updates(some_rows(size=9)))
    assert aggregate.metrics == {"num_left_out": left_out}
    assert aggregate.num_clients == 11 - left_out


def test_running_statistics_have_no_part_in_distances() -> None:
    """Their size says nothing about training. Control: as parameters they decide."""
    rows = some_rows(size=40)
    expected = combine(fl.Krum(num_malicious=2), updates(rows[:, :30])).lanes["delta"]
    rows[:9, 30:] *= 1e4
    found = combine(fl.Krum(num_malicious=2), updates(rows, num_trained=30)).lanes["delta"]
    assert torch.equal(found[:30], expected)
    other = combine(fl.Krum(num_malicious=2), updates(rows)).lanes["delta"]
    assert not torch.equal(other[:30], expected)


def test_buckets_depend_on_clients_and_round_but_not_on_the_order_of_arrival() -> None:
    """So that an engine and sessions give the same model."""
    rows = some_rows(size=40)
    rule = fl.Bucketing(inner=fl.CoordinateMedian(), bucket_size=3)
    sent = updates(rows)
    expected = combine(rule, sent).lanes["delta"]
    turned = Updates(
        sent.client_ids[::-1], sent.weights_B.flip(0), {"delta": rows.flip(0)}, sent.based_on
    )
    torch.testing.assert_close(combine(rule, turned).lanes["delta"], expected)
    later = Updates(sent.client_ids, sent.weights_B, sent.lanes, [5] * 11)
    assert not torch.allclose(combine(rule, later).lanes["delta"], expected)


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (fl.Krum(num_malicious=2), 7),
        (fl.Krum(num_malicious=2, num_selected=9), 9),
        (fl.Bulyan(num_malicious=2), 11),
        (fl.Bucketing(inner=fl.Krum(num_malicious=1), bucket_size=2), 9),
        (fl.TrimmedMean(trimmed_share=0.4), 1),
    ],
)
def test_a_rule_needs_enough_updates(rule: RobustAggregation, needed: int) -> None:
    """With one less, the round fails and says what to change."""
    rows = some_rows(size=9)
    combine(rule, updates(rows[:needed]))
    if needed > 1:
        with pytest.raises(RoundError, match=rf"needs {needed} updates, .*stragglers.min_reports"):
            combine(rule, updates(rows[: needed - 1]))


@pytest.mark.parametrize(
    "rule", [*ATTACKED.values(), fl.NormBound(by_examples=True, clip_norm=1.0)], ids=str
)
def test_secure_aggregation_refuses_each_rule_with_the_reason(rule: object) -> None:
    """Control: the mean is accepted."""
    reason = "must see each" if isinstance(rule, FullAggregation) else "own methods"
    with pytest.raises(ConfigError, match=rf"{type(rule).__name__} .*{reason}.*fl.WeightedMean"):
        require_weighted_mean(rule)
    require_weighted_mean(fl.WeightedMean(by_examples=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fl.TrimmedMean(trimmed_share=0.5), "trimmed_share is 0.5; give .* < 0.5"),
        (lambda: fl.Krum(num_malicious=-1), "num_malicious is -1"),
        (lambda: fl.Bulyan(num_malicious=-1), "num_malicious is -1"),
        (lambda: fl.FLTrust(num_root_examples=0), "num_root_examples is 0"),
        (
            lambda: fl.FLTrust(root=(torch.ones(2, 3), torch.ones(2)), num_root_examples=2),
            "num_root_examples is 2, but root examples are given",
        ),
        (lambda: fl.CenteredClipping(clip_radius=0.0), "clip_radius is 0.0"),
        (lambda: fl.NormBound(by_examples=True, clip_norm=0.0), "clip_norm is 0.0"),
        (lambda: fl.GeometricMedian(by_examples=True, smoothing=0.0), "smoothing is 0.0"),
    ],
)
def test_parameters_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    """When the rule is made."""
    with pytest.raises(ValueError, match=message):
        make()
