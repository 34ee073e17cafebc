"""Identity keys between processes: rotated between rounds, and never swapped silently."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Status
from fedlearn.identity.identity import IDENTITY_FILE, Identity
from fedlearn.identity.lineage import Lineage
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.rounds.records import RoundRecord
from fedlearn.secagg.draw import RosterDraw
from fedlearn.store.registry import StoredRegistry
from tests.e2e.deployed import SECURE, Site, site_in
from tests.processes import Launcher, until

#: More rounds than a test has time for.
NUM_CLIENTS, NUM_ROUNDS = 4, 100_000

pytestmark = pytest.mark.slow


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """A deployment that asks four of four clients, of which three must remain."""
    counts = (f"num_rounds={NUM_ROUNDS}", f"cohort.num_wanted={NUM_CLIENTS}")
    with site_in(launcher, tmp_path, *SECURE, *counts, "evaluation.every_rounds=0") as site:
        yield site


def swap_key(site: Site, number: int) -> None:
    """Do what an active attacker would: replace a client's key by one's own.

    From then on its owner takes the client's part in sessions.
    """
    folder = site.home(number).folder / "identity"
    forged = Identity.create()
    played = replace(Identity.load_or_create(folder), identity_key=forged.identity_key)
    (folder / IDENTITY_FILE).write_bytes(played.pem)
    enrolment = json.loads((folder / "enrolment.json").read_text())
    enrolment["lineage"] = Lineage(forged.public_key).to_bytes().hex()
    (folder / "enrolment.json").write_text(json.dumps(enrolment))
    with site.database() as database:
        registry = StoredRegistry(database, SystemClock())
        client = registry.clients()[number]
        token = registry.invite(client.name, tags=client.tags, valid_s=60.0)
        registry.redeem(
            client.name,
            token,
            identity_key=forged.public_key,
            certify=lambda _: (b"", client.fingerprint, client.certificate_expires_utc),
        )


def is_full(record: RoundRecord) -> bool:
    return record.participations.num(Status.REPORTED) == NUM_CLIENTS


def test_a_running_client_replaces_its_keys_and_the_others_go_on_with_it(site: Site) -> None:
    """Between two rounds: it stays the same client, and the others follow its chain of keys."""
    coordinator = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(coordinator, 1)
    before = site.enrolment(1)
    assert "will be replaced" in site.type("rotate", "client-1")
    until(lambda: site.enrolment(1).lineage.num_rotations == 1)
    after, num_before = site.enrolment(1), len(site.rounds())
    assert after.client_id == before.client_id
    assert after.lineage.first_key == before.identity.public_key
    until(lambda: any(map(is_full, site.rounds()[num_before + 1 :])))
    pin = site.home(0).keys.pin_file(site.enrolment(0)).read().clients[after.client_id]
    assert (pin.key, pin.num_rotations) == (after.identity.public_key, 1)
    coordinator.kill()
    listed = [json.loads(line) for line in site.type("pins", "client-0", "--json").splitlines()]
    assert [each["client_id"] for each in listed] == list(range(NUM_CLIENTS))


def test_a_swapped_key_and_a_stranger_are_refused_and_named_in_the_log(site: Site) -> None:
    """In a later run after a restart, since pins outlive both. Control: before, all take part.

    Clients pin the keys of the clients they share a sum with, so all four must be in one.
    """
    first = site.serving()
    clients = [site.join(number) for number in range(NUM_CLIENTS)]
    until(lambda: any(map(is_full, site.rounds())), told=first.tail)
    for process in (first, *clients):
        process.send(signal.SIGTERM)
        process.wait()
    said = site.type("roster", "-o", "all.roster")
    assert all(f"client-{number}" in said for number in range(NUM_CLIENTS))
    values = json.loads((site.folder / "all.roster").read_text())
    values["clients"] = [each for each in values["clients"] if each["client_id"] != 2]
    (site.folder / "without-2.roster").write_text(json.dumps(values))
    swap_key(site, 2)
    site.change("name=again")
    second = site.serving()
    clients = [
        site.join(number, *(("--roster", "without-2.roster") if number == 1 else ()))
        for number in range(NUM_CLIENTS)
    ]

    def told() -> str:
        return "\n".join(each.tail() for each in (second, *clients))

    until(lambda: "pinned identity keys" in site.log("client-0"), told=told)
    assert "another key of client 2" in site.log("client-0")
    until(lambda: "pinned identity keys" in site.log("client-1"), told=told)
    assert "client 2, which is not in the roster" in site.log("client-1")


def fitting_draw(path: Path, *, factor: float, cohort_size: int, num_rounds: int) -> RosterDraw:
    """Rename the clients of a roster until its draws have enough clients, but never all."""
    given = IdentityRoster.load(path)
    for number in range(1000):
        clients = {
            each: replace(entry, name=f"{entry.name}-{number}")
            for each, entry in given.clients.items()
        }
        roster = replace(given, clients=clients)
        draw = RosterDraw(roster=roster.digest, client_ids=clients.keys(), factor=factor)
        drawn = [
            len(draw.select(clients, round_num=round_num, cohort_size=cohort_size))
            for round_num in range(num_rounds)
        ]
        if cohort_size <= min(drawn) and max(drawn) < len(clients):
            roster.save(path)
            return draw
    raise AssertionError("no roster fits")


def test_clients_with_a_roster_are_asked_when_it_draws_them_and_refuse_other_rounds(
    site: Site,
) -> None:
    """Two of four are asked, out of two or three that are drawn.

    The control: a coordinator without the roster asks any clients, and they refuse.
    """
    site.change("num_rounds=1")
    coordinator = site.serving()
    clients = [site.join(number) for number in range(NUM_CLIENTS)]
    assert coordinator.wait() == 0, coordinator.tail()
    for client in clients:
        client.send(signal.SIGTERM)
        client.wait()
    site.type("roster", "-o", "all.roster")
    draw = fitting_draw(site.folder / "all.roster", factor=1.5, cohort_size=2, num_rounds=3)
    policy = site.folder / "policy.toml"
    policy.write_text("[policy.secure_aggregation]\nmin_cohort = 2\nmax_draw_factor = 1.5\n")
    options = ("--roster", "all.roster", "--config", str(policy))
    roster = f"secure_aggregation.roster={site.folder / 'all.roster'}"
    drawing = (roster, "secure_aggregation.draw_factor=1.5")
    rounds = ("num_rounds=3", "cohort.num_wanted=2", "stragglers.over_selection=1")
    site.change("name=drawn", *rounds, *drawing)
    coordinator = site.serving()
    clients = [site.join(number, *options) for number in range(NUM_CLIENTS)]
    assert coordinator.wait() == 0, coordinator.tail()
    committed = site.rounds()
    assert len(committed) == 3
    for record in committed:
        asked = [ClientId(each) for each in record.participations.client_ids.tolist()]
        assert draw.select(asked, round_num=record.round_num, cohort_size=2) == asked
        assert record.participations.num(Status.REPORTED) == 2
    assert "refused_by_policy" not in site.log("client-*")
    for client in clients:
        client.send(signal.SIGTERM)
        client.wait()
    site.change("name=undrawn", "num_rounds=100000", "secure_aggregation.roster=")
    site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number, *options)
    until(lambda: '"rule": "max_draw_factor"' in site.log("client-*"))
