"""What a population's ledger comes to, for a reader."""

from dataclasses import dataclass

from fedlearn.algorithms.cohorts import Adjacency

#: By adjacency what is hidden.
_HIDDEN = {
    Adjacency.ADD_OR_REMOVE: "one user added or removed",
    Adjacency.REPLACE: "one user replaced",
    Adjacency.ZERO_OUT: "one example of a user taken away",
}


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What a population's ledger comes to.

    Attributes:
        epsilon: Of what was released, against whoever does not see the cohorts.
        epsilon_with_cohorts: The same against whoever sees them, and not the updates.
        target_delta: δ of both.
        adjacency: What is hidden.
        num_charged: Rounds charged, those of other runs included.
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
        """What is hidden, in words."""
        return _HIDDEN[self.adjacency]

    def text(self) -> str:
        """Return it in words."""
        others = self.num_charged - self.num_own
        more = f" and {others} of other runs" if others else ""
        return (
            f"ε {self.epsilon:.3g} of the models released, {self.epsilon_with_cohorts:.3g} for who "
            f"saw the cohorts, at δ {self.target_delta:g}, {self.hidden}; "
            f"{self.num_own} rounds charged{more}"
        )
