"""A readable summary of what a population's ledger has spent."""

from dataclasses import dataclass

from fedlearn.algorithms.cohorts import Adjacency

#: Descriptions of what each adjacency hides.
_HIDDEN = {
    Adjacency.ADD_OR_REMOVE: "one user added or removed",
    Adjacency.REPLACE: "one user replaced",
    Adjacency.ZERO_OUT: "one example of a user taken away",
}


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The total spending in a population's ledger.

    Attributes:
        epsilon: ε of the releases, against an adversary that does not see the cohorts.
        epsilon_with_cohorts: ε against an adversary that sees the cohorts, but not the updates.
        target_delta: δ of both.
        adjacency: The kind of difference between neighbors, that is, what is hidden.
        num_charged: Rounds charged, including those of other runs.
        num_own: Rounds that this run charged.
    """

    epsilon: float
    epsilon_with_cohorts: float
    target_delta: float
    adjacency: Adjacency
    num_charged: int
    num_own: int

    @property
    def hidden(self) -> str:
        """Description of what the guarantee hides."""
        return _HIDDEN[self.adjacency]

    def format(self, *, of: str = "released models") -> str:
        """Format the spending as a sentence; ``of`` is what was released."""
        others = self.num_charged - self.num_own
        more = f" and {others} of other runs" if others else ""
        return (
            f"ε {self.epsilon:.3g} for the {of}, {self.epsilon_with_cohorts:.3g} for "
            f"an observer of the cohorts, at δ {self.target_delta:g}, {self.hidden}; "
            f"{self.num_own} round{'' if self.num_own == 1 else 's'} charged{more}"
        )
