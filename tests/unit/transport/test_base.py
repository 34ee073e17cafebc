"""Split requests into what a cohort shares and what is for one client alone."""

import torch

from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, EvaluateRequest, SecureTrainRequest, TrainRequest
from fedlearn.transport.base import CohortRequests

TRAIN = TrainRequest(
    round_num=1,
    attempt=0,
    tensors={"w": torch.ones(3)},
    order=("w",),
    settings={"epochs": 1},
    seed=2,
)
ONE, OTHER, THIRD = ClientId(1), ClientId(2), ClientId(3)


def test_a_cohort_is_sent_one_model_and_each_client_its_packets() -> None:
    """Control: another model is another request."""
    masking = {each: SecureTrainRequest(message=b"%d" % each, train=TRAIN) for each in (ONE, OTHER)}
    found = CohortRequests.of(masking)
    assert found.places == {ONE: 0, OTHER: 0}
    assert found.personal == {ONE: b"1", OTHER: b"2"}
    assert [encode(each) for each in found.shared] == [
        encode(SecureTrainRequest(message=b"", train=TRAIN))
    ]
    own = TrainRequest(**vars(TRAIN))
    found = CohortRequests.of({**masking, THIRD: SecureTrainRequest(message=b"3", train=own)})
    assert found.places == {ONE: 0, OTHER: 0, THIRD: 1}


def test_other_requests_are_sent_as_they_are() -> None:
    """Clients with the same object share one request, and nothing is personal."""
    evaluation = EvaluateRequest(round_num=1, tensors={})
    found = CohortRequests.of({ONE: TRAIN, OTHER: evaluation, THIRD: TRAIN})
    assert found.places == {ONE: 0, OTHER: 1, THIRD: 0}
    assert list(found.shared) == [TRAIN, evaluation]
    assert not found.personal


def test_a_training_in_the_clear_is_not_the_one_that_is_masked() -> None:
    """Both hold the same model, but their replies differ."""
    found = CohortRequests.of({ONE: TRAIN, OTHER: SecureTrainRequest(message=b"2", train=TRAIN)})
    assert [type(each) for each in found.shared] == [TrainRequest, SecureTrainRequest]
