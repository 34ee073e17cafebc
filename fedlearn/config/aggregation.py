"""Configuration of the rule that combines the updates of a round."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature

from numpy.typing import ArrayLike
from pydantic import Field

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.bucketing import Bucketing
from fedlearn.algorithms.fltrust import FLTrust
from fedlearn.algorithms.geometric_median import CenteredClipping, GeometricMedian
from fedlearn.algorithms.krum import Bulyan, Krum
from fedlearn.algorithms.local_parts import KeepLocal
from fedlearn.algorithms.median import CoordinateMedian, TrimmedMean
from fedlearn.algorithms.norm_bound import NormBound
from fedlearn.algorithms.recipes import Algorithm
from fedlearn.algorithms.strategy import Strategy
from fedlearn.config.components import DeclaredSection, build_component, kind, kinds
from fedlearn.config.own_functions import bind_own_function, wrong_return_error
from fedlearn.config.section import Args, Factory, Problem
from fedlearn.config.toml import quote
from fedlearn.core.features import Inputs
from fedlearn.core.ranges import Count

#: Rules that average all updates, so that buckets would change nothing.
_MEANS = ("own", "norm_bound")


class AggregationSection(DeclaredSection):
    """How the updates of a round are combined."""

    rule: str = Field(description="How the updates of a round are combined.")
    bucket_size: Count = Field(
        1,
        description="Updates that are averaged in random buckets before the rule combines the "
        "averages, >= 1.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse buckets for rules that average all updates."""
        if self.bucket_size > 1 and self.rule in _MEANS:
            text = f"is {self.bucket_size} without effect on the rule {quote(self.rule)}"
            yield Problem(("bucket_size", "rule"), f"{text}; leave it out, or choose another rule")

    def apply(self, strategy: Strategy) -> Strategy:
        """Return the strategy with this rule in place of its mean.

        Raises:
            ValueError: The strategy has another aggregation.
        """
        if self.rule == "own":
            return strategy
        match strategy:
            case Algorithm(aggregation=WeightedMean(by_examples=by_examples)):
                is_weighted = "by_examples" in signature(type(self).make).parameters
                rule = self.build(**({"by_examples": by_examples} if is_weighted else {}))
                if self.bucket_size > 1:
                    rule = Bucketing(inner=rule, bucket_size=self.bucket_size)
                return replace(strategy, aggregation=rule)
            case KeepLocal(inner=inner):
                return replace(strategy, inner=self.apply(inner))
        raise ValueError(
            f"it has its own aggregation, so aggregation.rule = {quote(self.rule)} cannot "
            "replace it; leave it out, or choose an algorithm that averages"
        )


class FLTrustSection(AggregationSection):
    """Trusts updates that are similar to the coordinator's own."""

    root: Factory | None = Field(
        None,
        description="A function that returns the coordinator's root examples, as features and "
        'labels: "module:function" or "path/to/file.py:function"; without it they are drawn from '
        "the training examples of the table data.",
    )
    root_args: Args = Field({}, description="Keyword arguments of the function.")

    def problems(self) -> Iterator[Problem]:
        """Refuse a number of examples, or none, that contradicts the function."""
        yield from super().problems()
        if self.root is None and self.root_args:
            text = "are given, but there is no aggregation.root that takes them"
            yield Problem(("root_args", "root"), text)
        number = self.model_dump()["num_root_examples"]
        if self.root is not None and number is not None:
            text = f"is {number}, but all examples of aggregation.root are used; leave it out"
            yield Problem(("num_root_examples", "root"), text)

    def build(self, **given: object) -> FLTrust:
        """Call the function, if there is one, and build the rule."""
        return build_component(FLTrust, self, root=self._load_root(), **given)

    def _load_root(self) -> tuple[Inputs[ArrayLike], ArrayLike] | None:
        if self.root is None:
            return None
        made = bind_own_function("aggregation.root", self.root, self.root_args)()
        if not isinstance(made, tuple) or len(made) != 2:  # noqa: PLR2004 - the two of a pair
            needed = "a pair of features and labels"
            raise wrong_return_error("aggregation.root", self.root, made, needed)
        features, labels = made
        return features, labels


AGGREGATIONS = kinds(
    "rule",
    AggregationSection,
    kind("own", "The algorithm's own rule: for most a weighted mean.", WeightedMean),
    kind("median", "The median of each number.", CoordinateMedian),
    kind(
        "trimmed_mean",
        "The mean of each number without its largest and smallest values.",
        TrimmedMean,
        trimmed_share=0.2,
    ),
    kind("krum", "The update, or updates, that are nearest to most others.", Krum),
    kind("bulyan", "The values near the median of the updates that Krum selects.", Bulyan),
    kind(
        "geometric_median",
        "The point with the smallest sum of distances to the updates (RFA).",
        GeometricMedian,
    ),
    kind(
        "centered_clipping",
        "The mean of the updates, clipped around the aggregate of the round before.",
        CenteredClipping,
    ),
    kind(
        "fltrust",
        "The mean of the updates by how similar they are to the coordinator's own (FLTrust).",
        FLTrustSection,
        FLTrust,
    ),
    kind("norm_bound", "The mean of the updates, each scaled down to a largest norm.", NormBound),
    given=("by_examples", "last", "server_delta"),
)
