"""Builds the secure aggregation plan of a run, and loads the roster that draws its clients."""

from pathlib import Path

from fedlearn.algorithms.aggregations import WeightedMean, require_weighted_mean
from fedlearn.algorithms.compression import Compressor, find_compressor
from fedlearn.algorithms.lanes import DELTA
from fedlearn.algorithms.power_sgd import PowerSgd
from fedlearn.algorithms.quantization import Quantized
from fedlearn.algorithms.random_k import RandomK
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy, StrategyWrapper
from fedlearn.algorithms.top_k import TopK
from fedlearn.config.tree import Config
from fedlearn.errors import ConfigError
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.privacy.plan import ExampleNoiseStrategy
from fedlearn.secagg.draw import RosterDraw
from fedlearn.secagg.plan import SecurePlan


def build_secure_plan(
    config: Config, policy: StragglerPolicy, strategy: Strategy
) -> SecurePlan | None:
    """Build the plan of secure aggregation; ``None``: it is off.

    Raises:
        ConfigError: No parameters satisfy the security assumptions, a sum could overflow, or the
            algorithm needs more than the sum.
    """
    section = config.secure_aggregation
    if not section.is_on:
        return None
    try:
        mean = require_summable(strategy)
    except ConfigError as error:
        raise ConfigError(f'secure_aggregation.mode is "{section.mode}": {error}') from error
    plan = section.plan(
        policy.cohort_size,
        min_reports=policy.min_reports,
        by_examples=mean.by_examples,
        further=[lane for lane in strategy.lanes if lane is not DELTA],
        compressor=find_compressor(strategy.transforms),
        privacy=config.privacy,
        has_model=config.has_model,
    )
    plan.explain()  # raises where a sum could overflow
    return plan


def require_summable(strategy: Strategy) -> WeightedMean:
    """Return the weighted mean with which a strategy aggregates, if a secure sum can compute it.

    Raises:
        ConfigError: The strategy needs more than a sum, or gives clients different tasks.
    """
    if _varies_by_client(strategy):
        raise ConfigError(
            "its terms prescribe one training for all, but each client gets its own task; leave "
            f"local_of out (or {type(strategy).__name__}.locals_for), or switch secure aggregation "
            "off"
        )
    compressor = find_compressor(strategy.transforms)
    if compressor is not None and not compressor.summed_part:
        name = type(compressor).__name__
        raise ConfigError(
            f"what {name} sends cannot be added under masks: {_why_not_summed(compressor)}; use "
            'compression.method = "shared_random_k", or lower secure_aggregation.modulus_bits to '
            "send fewer bits for each number"
        )
    return require_weighted_mean(strategy.aggregation)


def _why_not_summed(compressor: Compressor) -> str:
    """Say why a secure sum cannot add the parts of a compressor."""
    match compressor:
        case TopK():
            return "each client has its own positions, which follow from its data"
        case RandomK():
            return "each client has its own positions"
        case Quantized():
            return "each client has its own scales, and a secure sum rounds by itself"
        case PowerSgd():
            return "its second matrix is computed from the sum of the first, in another exchange"
        case _:
            return "it declares no summed_part"


def load_roster_draw(config: Config) -> RosterDraw | None:
    """Load the roster that decides which clients may be asked; ``None``: there is none.

    Raises:
        DeploymentError: The file is missing, damaged or of a later version.
    """
    section = config.secure_aggregation
    if not section.draws:
        return None
    roster = IdentityRoster.load(Path(section.roster))
    client_ids = roster.clients.keys()
    return RosterDraw(roster=roster.digest, client_ids=client_ids, factor=section.draw_factor)


def _varies_by_client(strategy: Strategy) -> bool:
    """Whether the strategy, or one that it wraps, may give each client its own task."""
    tells = type(strategy).locals_for
    if isinstance(strategy, StrategyWrapper) and tells in (
        StrategyWrapper.locals_for,
        ExampleNoiseStrategy.locals_for,
    ):
        # A wrapper that passes `locals_for` on is as uniform as the strategy inside.
        return _varies_by_client(strategy.inner)
    return tells is not Strategy.locals_for
