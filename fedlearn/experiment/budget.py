"""Predicts the privacy cost of a run: ε by round, as a table and a picture."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedlearn.algorithms.cohorts import Adjacency, CyclicCohorts, PoissonCohorts, UserCohorts
from fedlearn.assembly import Components
from fedlearn.errors import ConfigError
from fedlearn.experiment.figures import INK, RUN_COLORS, label_axes, new_figure, write_png
from fedlearn.experiment.layout import facts_text, table_text
from fedlearn.privacy.accounting import epsilon_against_coordinator, epsilon_of_release
from fedlearn.privacy.events import Cohorts, Spent
from fedlearn.privacy.plan import PrivacyPlan

#: By adjacency, the difference between two neighboring data sets, in words.
_NEIGHBORS = {
    Adjacency.ADD_OR_REMOVE: "one user is there or not",
    Adjacency.REPLACE: "one user has other data",
    Adjacency.ZERO_OUT: "one example of one user counts or not; that the user takes part shows",
}
#: Shares of the rounds at which ε is computed; each takes about a second.
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The privacy cost of the first rounds of a run, including what was spent before.

    Attributes:
        num_rounds: Number of rounds.
        epsilon: ε of the release, against an observer who does not see the cohorts.
        epsilon_with_cohorts: The same against an observer who sees the cohorts but no updates.
    """

    num_rounds: int
    epsilon: float
    epsilon_with_cohorts: float


@dataclass(frozen=True, kw_only=True)
class PrivacyForecast:
    """The predicted privacy cost of a run.

    Attributes:
        plan: The privacy plan, with the guarantee.
        target_delta: δ.
        epsilon: The budget; ``None``: there is none.
        num_before: Rounds that earlier runs charged to the same clients.
        costs: Costs after some of the rounds, in order.
    """

    plan: PrivacyPlan
    target_delta: float
    epsilon: float | None
    num_before: int
    costs: tuple[Cost, ...]

    def facts(self) -> dict[str, object]:
        """Return the prediction as JSON values."""
        cohorts = self.plan.cohorts
        return {
            "mode": self.plan.mode_text.partition(":")[0],
            "adjacency": self.plan.accounted.adjacency.value,
            "users": cohorts.population,
            "cohort": self.plan.num_wanted,
            "largest_cohort": cohorts.largest,
            "clip_norm": self.plan.clip_norm,
            "clip_quantile": self.plan.clip_quantile,
            "noise_multiplier": self.plan.noise_multiplier,
            "bands": self.plan.bands,
            "target_delta": self.target_delta,
            "epsilon": self.epsilon,
            "rounds_before": self.num_before,
            "rounds": [
                {
                    "round": each.num_rounds,
                    "epsilon": each.epsilon,
                    "epsilon_with_cohorts": each.epsilon_with_cohorts,
                }
                for each in self.costs
            ],
        }

    def render(self) -> str:
        """Format the prediction as text: the guarantee, and a table of costs."""
        rows = [("round", "ε of the release", "ε for who sees cohorts")]
        rows += [
            (str(each.num_rounds), f"{each.epsilon:.4g}", f"{each.epsilon_with_cohorts:.4g}")
            for each in self.costs
        ]
        return f"{facts_text(self._describe_guarantee())}\n\n{table_text(rows, values_right=True)}"

    def _describe_guarantee(self) -> Iterator[tuple[str, str]]:
        plan, cohorts = self.plan, self.plan.cohorts
        yield "mode", plan.mode_text
        yield "sampling", _describe_sampling(cohorts)
        adjacency = plan.accounted.adjacency
        yield "adjacency", f"{adjacency}: {_NEIGHBORS[adjacency]}"
        yield "clip", plan.clip_text
        yield "noise", f"{plan.noise_multiplier:.4g} times the clip, {plan.noise_text}"
        yield "bands", plan.correlation_text(self.costs[-1].num_rounds) or ""
        yield "delta", f"{self.target_delta:g}"
        if self.epsilon is not None:
            yield "budget", f"ε {self.epsilon:g} of the release"
        if self.num_before:
            yield "before", f"{self.num_before} rounds were charged to these clients; they count"


def _describe_sampling(cohorts: UserCohorts) -> str:
    users = cohorts.population
    match cohorts:
        case PoissonCohorts():
            rate = f"each of {users} users at rate {cohorts.rate:.4g}"
            return f"Poisson: {rate}, at most {cohorts.largest} a round"
        case CyclicCohorts():
            groups = f"{users} users in {cohorts.num_groups} groups, which are asked in turn"
            return f"cyclic: {groups}: that one is not asked hides nothing"
        case _ if cohorts.size == users:
            return f"all {users} users: that one is not asked hides nothing"
        case _:
            return f"{cohorts.size} of {users} users, without replacement"


def _choose_rounds(cohorts: Cohorts, num_rounds: int) -> list[int]:
    """Return the numbers of rounds at which to compute ε.

    Where groups of users take turns, ε rises only in the first round of a cycle.
    """
    counts = {max(1, round(share * num_rounds)) for share in _SHARES}
    if isinstance(cohorts, CyclicCohorts):
        every = cohorts.num_groups
        counts = {(count - 1) // every * every + 1 for count in counts} | {num_rounds}
    return sorted(counts)


def forecast_privacy(components: Components, *, before: Spent) -> PrivacyForecast:
    """Predict the privacy cost of a run on clients on whom ``before`` was already spent.

    Raises:
        ConfigError: The run has no privacy, or its sampling has no common guarantee with what was
            spent before.
    """
    plan, section = components.privacy, components.config.privacy
    if plan is None or section.target_delta is None:
        raise ConfigError('privacy.mode is "off", so there is no budget; set it to "central"')
    delta, num_rounds = section.target_delta, components.config.num_rounds
    costs = []
    for count in _choose_rounds(plan.cohorts, num_rounds):
        spent = {**before, plan.event: before.get(plan.event, 0) + count}
        try:
            cost = Cost(
                num_rounds=count,
                epsilon=epsilon_of_release(spent, target_delta=delta),
                epsilon_with_cohorts=epsilon_against_coordinator(spent, target_delta=delta),
            )
        except ValueError as error:
            raise ConfigError(f"privacy.population: {error}") from error
        costs.append(cost)
    return PrivacyForecast(
        plan=plan,
        target_delta=delta,
        epsilon=section.epsilon,
        num_before=sum(before.values()),
        costs=tuple(costs),
    )


def draw_forecast(forecast: PrivacyForecast, path: Path) -> Path:
    """Draw ε by round as the PNG ``path``, which is returned; an existing file is replaced.

    Raises:
        StoreError: The file cannot be written.
    """
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    rounds = [each.num_rounds for each in forecast.costs]
    lines = {
        "of the release": [each.epsilon for each in forecast.costs],
        "for who sees the cohorts": [each.epsilon_with_cohorts for each in forecast.costs],
    }
    in_turn = isinstance(forecast.plan.cohorts, CyclicCohorts)
    style = "steps-post" if in_turn else "default"
    for color, (label, values) in zip(RUN_COLORS, lines.items(), strict=False):
        axes.plot(rounds, values, marker="o", color=color, label=label, drawstyle=style)
    if forecast.epsilon is not None:
        axes.axhline(forecast.epsilon, color=INK, linestyle="--", label="budget")
    axes.set_yscale("log")
    label_axes(axes, "Privacy spent", "round", f"ε at δ = {forecast.target_delta:g}")
    return write_png(figure, path)
