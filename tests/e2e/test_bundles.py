"""A run that ships its trainer, with real processes: one owner approves it, another refuses it."""

from functools import partial
from pathlib import Path

import pytest

from fedlearn.client.bundle_store import BundleStore
from fedlearn.core.participations import Status
from fedlearn.deployment import part
from tests.bundles import build
from tests.e2e.deployed import SMALL, Site, site_in, until_said
from tests.processes import Launcher, until

pytestmark = pytest.mark.slow

NUM_ROUNDS = 2
#: The demo's trainer; it reads the configuration of the deployment, as data of this site.
CODE = """
import socket
import tomllib
from functools import partial
from pathlib import Path
from fedlearn.deployment import part

assert tomllib.loads((Path(__file__).parent / "parameters.toml").read_text())["width"] > 0
socket.if_nameindex()


class Trainer:
    def __new__(cls):
        return part.trainer()
"""


def _policy(folder: Path) -> Path:
    path = folder / "owner.toml"
    path.write_text(
        f"{SMALL}[policy.bundles]\nparameter_changes = true\n"
        f'data = ["{folder}"]\nvariables = ["{part.CONFIG}", "{part.CLIENT}"]\n'
    )
    return path


def _ran(site: Site) -> set[str]:
    """Return what clients ran, with their numbers."""
    with site.database() as database:
        found = database.run(site.places.run_name).load_trainers()
    return {f"{client}:{trainer}" for (_, client), trainer in found.items()}


def test_a_bundle_runs_where_its_owner_approves_it(launcher: Launcher, tmp_path: Path) -> None:
    """Then a version with other parameters needs no word, and runs where the first one did."""
    first = build(tmp_path / "first", code=CODE)
    second = build(tmp_path / "second", code=CODE, parameters="width = 16\n", version="1.1")
    for bundle in (first, second):
        (tmp_path / f"{bundle.manifest.version}.bundle").write_bytes(bundle.content)
    overrides = (
        f"num_rounds={NUM_ROUNDS}",
        "name=first",
        "cohort.num_wanted=1",
        "stragglers.over_selection=1.0",
        "stragglers.deadline_s=none",
        "evaluation.clients=0",
        "data.partition.num_clients=2",
        f"client.bundle={tmp_path / '1.0.bundle'}",
    )
    with site_in(launcher, tmp_path, *overrides) as site:
        coordinator = site.serving()
        stores = dict[int, BundleStore]()
        for number in (0, 1):
            client = site.join(number, "--config", str(_policy(tmp_path)))
            stores[number] = BundleStore(site.home(number).folder / "bundles")
            until(partial(stores[number].has, first.digest), told=client.tail)
            until_said(client, "bundle")  # it has been told that the bundle does not run here
        willing = site.enrolment(0).client_id
        assert site.rounds() == []
        why = partial(site.type, "why", "--config", str(site.file))
        until(lambda: why().count("waits for the owner's `fedlearn approve`") == len(stores))
        site.type("refuse", str(site.home(1).folder), first.digest[:8])
        site.type("approve", str(site.home(0).folder), first.digest[:8])
        assert coordinator.wait() == 0, coordinator.tail()
        assert _ran(site) == {f"{willing}:bundle:{first.digest}"}
        assert first.digest in site.type("rounds", "--trainers", "--config", str(site.file))
        for each in site.rounds():
            assert [p.status for p in each.participations] == [Status.REPORTED]

        site.change("name=second", f"client.bundle={tmp_path / '1.1.bundle'}")
        coordinator = site.serving()
        assert coordinator.wait() == 0, coordinator.tail()
        assert _ran(site) == {f"{willing}:bundle:{second.digest}"}
        assert "waits for the owner's `fedlearn approve`" in site.log("client-1")
