"""How many bytes of roster and signatures a client downloads, for growing cohorts."""

from dataclasses import replace

import numpy as np
import pytest

from fedlearn.core.messages import ClientId
from fedlearn.secagg import audit, messages
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import Advert, Survivors, encode
from fedlearn.secagg.parameters import Adversary, Assumptions, Parameters, derive
from fedlearn.secagg.session import Session
from fedlearn.secagg.terms import Terms
from tests.security.test_sparse_graph import terms_for


def terms_of(parameters: Parameters) -> Terms:
    return replace(
        terms_for(10_000),
        topology=parameters.assumptions.topology,
        num_clients=parameters.num_clients,
        num_neighbors=parameters.num_neighbors,
        threshold=parameters.threshold,
        quorum=parameters.quorum,
        min_survivors=parameters.min_survivors,
    )


def parameters_of(num_clients: int, topology: Topology) -> Parameters:
    return derive(
        num_clients,
        assumptions=Assumptions(
            adversary=Adversary.ACTIVE_SERVER,
            topology=topology,
            corruption=0.1,
            dropout=0.1,
            sigma_bits=40,
            eta_bits=30,
        ),
    )


def downloads(terms: Terms) -> tuple[int, int, int]:
    """Return the encoded sizes in R1, R3 and R4 if a tenth drop out; all keys are random bytes."""
    drawn, n = np.random.default_rng(0), terms.num_clients
    adverts = [
        Advert(
            client_id=ClientId(11 * each),
            packet_key=drawn.bytes(32),
            mask_key=drawn.bytes(32),
            nonce=drawn.bytes(16),
            signature=drawn.bytes(64),
        )
        for each in range(n)
    ]
    ids = [advert.client_id for advert in adverts]
    session, tree = Session.of(terms, adverts, directory=dict.fromkeys(ids, bytes(32)))
    roster = session.roster_for(ids[n // 2], tree=tree)
    alive = ids[n // 10 :]
    survivors = session.pack_ranks(alive)
    signatures = {each: drawn.bytes(64) for each in alive}
    shown = audit.show(signatures, session, survivors=survivors, tree=tree)
    told: tuple[messages.Message, ...] = roster, Survivors(ranks=survivors), shown
    first, second, third = (len(encode(message)) for message in told)
    return first, second, third


@pytest.mark.slow
def test_a_download_grows_with_the_neighbors_and_the_logarithm_of_the_cohort() -> None:
    """Four times the clients cost 1.6 times the bytes: a larger k, deeper proofs; plus bitmaps."""
    small, large = (downloads(terms_of(parameters_of(n, Topology.SPARSE))) for n in (1_000, 4_000))
    assert small[0] < 41_000
    assert large[0] < 1.6 * small[0]
    assert large[2] < 1.6 * small[2]
    assert (small[1], large[1]) == (6 + 4 + 125, 6 + 4 + 500)
    whole = [152 * n + 8 * (9 * n // 10) for n in (1_000, 4_000)]
    assert sum(small) < whole[0] / 2, "the control: when all were told of all"
    assert sum(large) < whole[1] / 5


@pytest.mark.parametrize("num_clients", [10, 30, 100])
def test_in_the_complete_graph_a_client_is_told_no_more_than_when_it_was_told_all(
    num_clients: int,
) -> None:
    parameters = parameters_of(num_clients, Topology.COMPLETE)
    found = downloads(terms_of(parameters))
    alive = num_clients - num_clients // 10
    header, count = 6, 4
    before = (
        header + count + 152 * num_clients,
        header + count + 8 * alive,
        header + count + 72 * parameters.quorum,
    )
    assert found[0] == before[0] + 32 + 4 + 4 + 8, "root, size, rank, and an empty proof"
    assert sum(found) < 1.02 * sum(before)
