"""A secure plan's own explanation, the quorum that noise requires, and the hash of a request."""

import pytest
import torch
from torch import nn

from fedlearn.core.codec import decode, encode, encode_constants, split
from fedlearn.core.messages import EvaluateRequest, TrainRequest
from fedlearn.core.params import Params
from fedlearn.errors import ProtocolError
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan, hash_request


@pytest.mark.parametrize(
    ("num_clients", "dropout", "told", "is_warned"),
    [
        (
            13,
            0.3,
            "among those of 7 others, if the coordinator knows the updates of A = 2",
            False,
        ),
        (4, 0.0, "among those of 2 others, if the coordinator knows the updates of A = 1", False),
        (3, 0.0, "among those of 1 others, if the coordinator knows the updates of A = 1", True),
    ],
)
def test_a_plan_tells_behind_how_many_others_it_hides_an_update(
    num_clients: int, dropout: float, told: str, *, is_warned: bool
) -> None:
    """It also warns of sums so small that clients refuse them by default."""
    assumptions = Assumptions(
        adversary=Adversary.ACTIVE_SERVER,
        topology=Topology.COMPLETE,
        corruption=0.1,
        dropout=dropout,
        sigma_bits=40,
        eta_bits=30,
    )
    parameters = derive(num_clients, assumptions=assumptions)
    plan = SecurePlan(
        parameters=parameters,
        min_survivors=parameters.min_survivors,
        clip_norm=1.0,
        statistics_norm=1.0,
        max_loss=1.0,
        max_examples=10,
        by_examples=True,
        modulus_bits=32,
    )
    hides = dict(plan.explain())["hides"]
    assert told in hides
    assert ("clients refuse sums of fewer than 4" in hides) == is_warned


@pytest.mark.parametrize(
    ("topology", "noise", "quorum"),
    [
        (Topology.SPARSE, None, 166),
        (Topology.SPARSE, 1.0, 280),
        (Topology.COMPLETE, 1.0, 166),
    ],
)
def test_where_noise_is_promised_and_clients_cannot_count_so_many_have_to_sign(
    topology: Topology, noise: float | None, quorum: int
) -> None:
    """Each client adds a share of the noise that fits the number of clients surely in the sum."""
    assumptions = Assumptions(
        adversary=Adversary.ACTIVE_SERVER,
        topology=topology,
        corruption=0.1,
        dropout=0.1,
        sigma_bits=40,
        eta_bits=30,
    )
    plan = SecurePlan(
        parameters=derive(300, assumptions=assumptions),
        min_survivors=280,
        clip_norm=1.0,
        statistics_norm=1.0,
        max_loss=1.0,
        max_examples=10,
        by_examples=False,
        modulus_bits=32,
        noise_multiplier=noise,
    )
    terms = plan.terms(
        Params.of(nn.Linear(2, 1)).layout,
        run_id=bytes(16),
        round_num=0,
        attempt=0,
        request_hash=bytes(32),
    )
    assert terms.quorum == quorum
    assert terms.num_assured == plan.num_assured
    assert plan.num_noisy == 280 - 30
    if noise is not None:
        assert terms.num_assured - 30 == plan.num_noisy
    released = dict(plan.explain())["released"]
    assert ("; 166 if the coordinator lies" in released) == (quorum == 166 and noise is None)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_request_has_one_hash_however_it_was_sent(*, evaluates: bool) -> None:
    """Clients compute the same hash as the terms, even if constants were sent separately."""
    tensors = {
        "head": torch.ones(3),
        "small": torch.ones(2, dtype=torch.float64),
        "base": torch.zeros(1 << 14),
        "table": torch.zeros(1 << 14, dtype=torch.int64),
        "counter": torch.tensor(7),
        "bias": torch.ones(5),
    }
    whole: TrainRequest | EvaluateRequest = TrainRequest(
        round_num=1,
        attempt=0,
        tensors=tensors,
        order=("head", "small"),
        settings={"epochs": 1},
        seed=2,
        broadcast={"anchor": torch.ones(3), "control": torch.ones(3)},
        sent_once=("anchor",),
    )
    if evaluates:
        once = {"anchor": torch.ones(3)}
        whole = EvaluateRequest(
            round_num=1, tensors=tensors, order=("head", "small"), sent_once=once
        )
    bare, constants = split(whole)
    # The same set for both, since a client keeps one.
    assert set(constants) == {"base", "table", "told/anchor"}
    found = decode(encode(bare), constants=encode_constants(constants))
    assert isinstance(found, TrainRequest | EvaluateRequest)
    assert hash_request(found) == hash_request(whole)
    with pytest.raises(ProtocolError, match="lacks the constants of its model"):
        decode(encode(bare))
    with pytest.raises(ProtocolError, match=r"the tensors \['head'\] are in the request and"):
        decode(encode(bare), constants=encode_constants({"head": torch.ones(3)}))
    other = decode(
        encode(bare), constants=encode_constants({**constants, "base": tensors["base"] + 1})
    )
    assert isinstance(other, TrainRequest | EvaluateRequest)
    assert hash_request(other) != hash_request(whole)
