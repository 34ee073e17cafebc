"""How a run adds up in secret, and whom a roster lets take part."""

from pathlib import Path

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy, Wrapped
from fedlearn.config.tree import Config
from fedlearn.errors import ConfigError
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.secagg.draw import Draw
from fedlearn.secagg.plan import SecurePlan


def secure_plan(config: Config, policy: StragglerPolicy, strategy: Strategy) -> SecurePlan | None:
    """Return what sessions of secure aggregation ask; ``None``: it is off.

    Raises:
        ConfigError: Nothing satisfies the assumptions, a sum could overflow, or the algorithm needs
            more than the sum.
    """
    section, aggregator = config.secure_aggregation, strategy.aggregation
    if not section.is_on:
        return None
    if _tells_each(strategy):
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", whose terms name one training for all, '
            'but clients are told each what to do; leave local_of out, or set the mode to "off"'
        )
    if not isinstance(aggregator, WeightedMean):
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", but {type(aggregator).__name__} must '
            "see each update, and the coordinator learns their sum alone; aggregate by a weighted "
            'mean, or set the mode to "off"'
        )
    plan = section.plan(
        policy.num_asked,
        min_reports=policy.min_reports,
        by_examples=aggregator.by_examples,
        further=[lane for lane in strategy.lanes if lane is not DELTA],
        noise_multiplier=config.privacy.noise_multiplier if config.privacy.is_distributed else None,
    )
    plan.explain()  # raises where a sum could overflow
    return plan


def roster_draw(config: Config) -> Draw | None:
    """Return whom the roster of a deployment lets be asked; ``None``: it has none.

    Raises:
        DeploymentError: The file is missing, damaged or of a later version.
    """
    section = config.secure_aggregation
    if not section.draws:
        return None
    roster = IdentityRoster.load(Path(section.roster))
    client_ids = roster.clients.keys()
    return Draw(roster=roster.digest, client_ids=client_ids, factor=section.draw_factor)


def _tells_each(strategy: Strategy) -> bool:
    """Return whether clients are told each what to do, whatever is around that."""
    if isinstance(strategy, PerClient):
        return True
    return isinstance(strategy, Wrapped) and _tells_each(strategy.inner)
