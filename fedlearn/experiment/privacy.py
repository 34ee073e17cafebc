"""What a run's privacy comes to as it begins: who it charges, and what was spent before."""

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from fedlearn.build import Pieces, Simulation, deployment, simulation
from fedlearn.config import Config
from fedlearn.config.data import NoData
from fedlearn.core.clock import Clock
from fedlearn.core.features import named
from fedlearn.errors import ConfigError
from fedlearn.experiment.spending import ledger_of
from fedlearn.privacy.events import Event
from fedlearn.privacy.ledger import Budget, Charging
from fedlearn.privacy.plan import BandedPlan
from fedlearn.simulation.population import Population
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.runs import Database, StoredRun

PiecesT = TypeVar("PiecesT", bound=Pieces)

#: Clients whose examples tell a population from others.
_LOOKED_AT = 16


def known_by_examples(population: Population) -> str:
    """Return a name by which clients are known again: a digest of some of their examples."""
    num_clients = population.num_clients
    sample = np.unique(np.linspace(0, num_clients - 1, _LOOKED_AT).astype(np.int64))
    digest = hashlib.blake2b(repr(num_clients).encode(), digest_size=8)
    for client_id in sample:
        features, labels = population.load(np.asarray([client_id])).gathered()
        for tensor in (*named(features).values(), labels):
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return f"examples-{digest.hexdigest()}"


def known(pieces: Simulation) -> Simulation:
    """Return the simulation with a name for the clients whose ledger it charges."""
    privacy = pieces.config.privacy
    if not privacy.is_on or privacy.population != "auto":
        return pieces
    named = privacy.model_copy(update={"population": known_by_examples(pieces.population)})
    return replace(pieces, config=pieces.config.model_copy(update={"privacy": named}))


def built_on(config: Config, *, data_dir: Path) -> Pieces:
    """Return the pieces of a run, with a name for its clients; none is trained.

    Those of a simulation, or, of a configuration without data, of a deployment.

    Raises:
        ConfigError: It cannot be built.
        DataError: Data are missing.
    """
    if isinstance(config.data, NoData):
        return deployment(config, data_dir=data_dir)
    return known(simulation(config, data_dir=data_dir))


def spent_before(pieces: Pieces, database: Database) -> dict[Event, int]:
    """Return what earlier runs have charged to the clients of a run that is to come.

    Raises:
        StoreError: The ledger cannot be read.
    """
    section = pieces.config.privacy
    if section.other_data_because is not None:
        return {}
    return StoredLedger(database, population=section.population, run="").spent()


class Promise(NamedTuple):
    """What a run's privacy comes to as it begins, or goes on.

    Attributes:
        notes: What a reader should know.
        charging: Charges its rounds; ``None``: nothing does.
        num_lost: Charges of the run that no committed round stands for.
    """

    notes: list[str]
    charging: Charging | None
    num_lost: int


def promise(pieces: Pieces, stored: StoredRun, *, num_finished: int, clock: Clock) -> Promise:
    """Return what a run's privacy comes to, of which so many rounds are committed.

    Raises:
        ConfigError: There is no common guarantee with what was spent before.
        StoreError: The ledger cannot be read.
    """
    plan, section = pieces.privacy, pieces.config.privacy
    if plan is None:
        return Promise([], None, 0)
    noise = f"noise {plan.noise_multiplier:.4g} times the clip norm ({plan.clip_text})"
    if section.reproducible:
        note = f"{noise}, from a public seed: nothing is private, and no ε is claimed"
        return Promise([note], None, 0)
    from fedlearn.privacy.accounting import epsilon_of_release  # noqa: PLC0415 (takes a second)

    delta, budget = section.target_delta, None
    assert delta is not None  # the configuration makes sure
    if section.epsilon is not None:
        budget = Budget(epsilon=section.epsilon, target_delta=delta)
    ledger = ledger_of(stored, section)
    kinds = {event.cohorts.adjacency.value for event in [*ledger.spent(), plan.event]}
    if len(kinds) > 1:
        raise ConfigError(
            f"cohort.sampling, privacy.mode: earlier runs on the clients {ledger.population!r} "
            f"were accounted for otherwise ({' and '.join(sorted(kinds))}), and both have no "
            "common guarantee; sample as they did, in the same mode, or, if the data are others', "
            "say so in privacy.other_data_because"
        )
    charging = Charging(
        ledger,
        plan.event.charged_by(stored.name),
        clip_norm=plan.clip_norm,
        budget=budget,
        epsilon_of=partial(epsilon_of_release, target_delta=delta),
        clock=clock,
    )
    due = pieces.config.num_rounds - num_finished
    notes = [f"{noise}; metrics of clients and training losses are without noise: keep them"]
    if pieces.config.coordinator.training.is_on:
        notes.append(
            "the coordinator trains on what is released and on examples of its own: "
            "post-processing, which costs no ε; nothing hides the examples that it has itself"
        )
    affordable = charging.foresee(due) if due > 0 else due
    if affordable < due:
        notes.append(f"the privacy budget is enough for {affordable} of the {due} rounds to come")
    num_lost = sum(ledger.spent_by_run().values()) - num_finished
    if num_lost > 0 and isinstance(plan, BandedPlan):
        notes.append(f"{num_lost} turns of earlier processes were lost: others are asked first")
    return Promise(notes, charging, num_lost)


def gone_on(pieces: PiecesT, *, num_lost: int) -> PiecesT:
    """Return the pieces of a run that goes on, of which so many charges no committed round is for.

    Where users take turns, those turns are over: what was asked of whom in them counts.
    """
    plan = pieces.privacy
    if not isinstance(plan, BandedPlan):
        return pieces
    plan = replace(plan, num_lost=num_lost)
    return replace(pieces, privacy=plan, sampler=plan.sampler)
