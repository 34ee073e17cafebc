"""What a population's ledger comes to, for a reader."""

from dataclasses import dataclass

from fedlearn.privacy.events import Adjacency


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What a population's ledger comes to.

    Attributes:
        epsilon: Of what was released, against whoever does not see the cohorts.
        epsilon_with_cohorts: The same against whoever sees them, and not the updates.
        target_delta: δ of both.
        adjacency: What one user's taking part means.
        num_charged: Rounds charged, those of other runs included.
        num_own: Rounds that this run charged.
    """

    epsilon: float
    epsilon_with_cohorts: float
    target_delta: float
    adjacency: Adjacency
    num_charged: int
    num_own: int

    def text(self) -> str:
        """Return it in words."""
        user = "added or removed" if self.adjacency is Adjacency.ADD_OR_REMOVE else "replaced"
        others = self.num_charged - self.num_own
        more = f" and {others} of other runs" if others else ""
        return (
            f"ε {self.epsilon:.3g} of the models released, {self.epsilon_with_cohorts:.3g} for who "
            f"saw the cohorts, at δ {self.target_delta:g}, one user {user}; "
            f"{self.num_own} rounds charged{more}"
        )
