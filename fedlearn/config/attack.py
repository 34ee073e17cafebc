"""Configuration of the clients that attack a simulation."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from fedlearn.config.components import DeclaredSection, kind, kinds
from fedlearn.config.own_functions import OwnFunctionSection, bind_own_function, require_attributes
from fedlearn.config.section import Problem
from fedlearn.core.ranges import Whole
from fedlearn.simulation.attacks import ATTACK_KINDS, Attack


class AttackSection(DeclaredSection):
    """Which simulated clients attack, and how."""

    kind: str = Field(description="What the attackers do.")
    num_attackers: Whole = Field(
        0, description="Number of attackers in the population, drawn by the seed."
    )
    clients: Annotated[tuple[Whole, ...], Field(strict=False)] = Field(
        (), description="The attackers, by number; without it they are drawn. The record has them."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse attackers without an attack, and an attack without attackers."""
        count, is_on = self.num_attackers, self.kind != "none"
        if is_on and not count:
            yield Problem(("num_attackers",), "is 0, but attack.kind is set; give a number >= 1")
        if not is_on and count:
            text = f"is {count}, but there is no attack; set attack.kind, or leave it out"
            yield Problem(("num_attackers", "kind"), text)
        if self.clients and len(set(self.clients)) != count:
            text = f"names {len(set(self.clients))} clients, but attack.num_attackers is {count}"
            yield Problem(("clients", "num_attackers"), f"{text}; give the same number")

    @property
    def is_on(self) -> bool:
        """Whether some clients attack."""
        return self.kind != "none"

    def make_attack(self) -> Attack:
        """Build the attack."""
        made: Attack = self.build()
        return made


class OwnAttackSection(OwnFunctionSection, AttackSection):
    """An attack of yours."""

    def make_attack(self) -> Attack:
        """Call the custom function; raises ConfigError if it does not return an attack."""
        key, needed = "attack.factory", ("poison", "forge", "poisons", "forges")
        made: Attack = bind_own_function(key, self.factory, self.args)()
        remedy = "let its class inherit from fedlearn.Attack"
        require_attributes(key, self.factory, made, needed, remedy)
        return made


ATTACKS = kinds(
    "kind",
    AttackSection,
    kind("none", "All clients are honest.", Attack),
    *(
        kind(name, str(make.__doc__).partition("\n")[0], make, num_attackers=1)
        for name, make in ATTACK_KINDS.items()
    ),
    kind(
        "python",
        "An attack of yours: a class or function that returns it.",
        OwnAttackSection,
        num_attackers=1,
    ),
)
