"""Client state between rounds: stacking, updating and checkpointing."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from fedlearn.algorithms.client_state import (
    ClientStates,
    from_tensors,
    make_initial_state,
    replace_states,
    split_states,
    stack_states,
    to_tensors,
)
from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import LocalSgd, MemorySpec, make_memory
from fedlearn.core.params import Params

KEEPING = LocalSgd(epochs=1, batch_size=1, learning_rate=0.1, momentum=0.9, keep_momentum=True)
FORGETTING = LocalSgd(epochs=1, batch_size=1, learning_rate=0.1, momentum=0.9)


def kept() -> ClientStates:
    rows = {"velocity": torch.arange(6.0).view(2, 3)}
    return split_states([7, 2], rows, mine=np.ones(2, np.bool_))


def test_a_client_gets_back_what_it_kept() -> None:
    """Rows are in the requested order, and zero for a client that has never trained."""
    rows = stack_states(kept(), [2, 99, 7])
    assert rows.keys() == {"velocity"}
    assert rows["velocity"].tolist() == [[3.0, 4.0, 5.0], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]


def test_rows_are_written_where_the_last_ones_were_if_they_fit() -> None:
    """Fewer clients fit; more clients, another dtype or another size do not."""
    memory = dict[str, Tensor]()
    whole = stack_states(kept(), [2, 7], memory=memory)["velocity"]
    assert stack_states(kept(), [7], memory=memory)["velocity"].data_ptr() == whole.data_ptr()
    assert whole[0].tolist() == [0.0, 1.0, 2.0]
    wider = {7: {"velocity": torch.ones(5)}, 2: {"velocity": torch.zeros(5)}}
    doubles = {7: {"velocity": torch.ones(3, dtype=torch.float64)}}
    for states, client_ids in ((kept(), [2, 7, 2]), (wider, [2, 7]), (doubles, [7])):
        found = stack_states(states, client_ids, memory=memory)["velocity"]
        expected = stack_states(states, client_ids)["velocity"]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert whole[0].tolist() == [0.0, 1.0, 2.0]


def test_a_client_by_itself_gets_what_it_kept_and_no_zeros() -> None:
    """The state of a deployed client is empty at first."""
    assert stack_states(kept(), [99]) == {}
    found = stack_states(kept(), [2])
    assert found.keys() == {"velocity"}
    assert found["velocity"].tolist() == [[3.0, 4.0, 5.0]]


def test_what_is_kept_is_used_only_if_the_rule_keeps_it() -> None:
    """Memory that the update does not keep starts at zero, even if a kept value is passed."""
    x, rows = [torch.zeros(1, 3)], stack_states(kept(), [2])
    assert make_memory(KEEPING, x, client_state=rows)["velocity"][0].tolist() == [[3.0, 4.0, 5.0]]
    assert make_memory(FORGETTING, x, client_state=rows)["velocity"][0].tolist() == [
        [0.0, 0.0, 0.0]
    ]


def test_a_client_that_diverged_keeps_what_it_had() -> None:
    """Rows of a block that are masked out do not change the state."""
    rows = {"velocity": torch.tensor([[math.nan] * 3, [8.0, 8.0, 8.0]])}
    after = replace_states(kept(), split_states([2], rows, mine=np.array([False, True])))
    assert after[7]["velocity"].tolist() == [0.0, 1.0, 2.0]
    assert after[2]["velocity"].tolist() == [8.0, 8.0, 8.0]


def test_what_is_kept_is_a_copy_of_one_clients_row() -> None:
    """Executors reuse the memory of the rows, and a view would keep those of the whole block."""
    rows = torch.ones(2, 3)
    found = split_states([0, 1], {"velocity": rows}, mine=np.ones(2, np.bool_))
    rows.zero_()
    for client_id in (0, 1):
        kept = found[client_id]["velocity"]
        assert kept.tolist() == [1.0, 1.0, 1.0]
        assert kept.untyped_storage().nbytes() == kept.nbytes


def test_a_round_leaves_the_value_before_it_as_it_was() -> None:
    """A run can return to an earlier state. Clients with an empty state are dropped."""
    before, changes = kept(), {2: {}, 7: {"velocity": torch.ones(3)}}
    after = replace_states(before, changes)
    assert after.keys() == {7}
    assert torch.equal(after[7]["velocity"], torch.ones(3))
    assert before.keys() == {7, 2}
    assert before[7]["velocity"].tolist() == [0.0, 1.0, 2.0]
    assert replace_states(before, {}) is before


def test_nothing_yet_has_the_size_and_the_dtype_of_what_will_be_kept() -> None:
    """One number per trainable parameter, or a fixed number of values."""
    params = Params.of(nn.Linear(2, 1).double())
    for over, size in ((Over.TRAINABLE, 3), (1, 1)):
        nothing = make_initial_state(MemorySpec(over=over, is_kept=True), params)
        assert (nothing.tolist(), nothing.dtype) == ([0.0] * size, torch.float64)


def test_a_checkpoint_restores_everything() -> None:
    """A resumed run writes the same checkpoint, whatever the order in which clients trained."""
    tensors = to_tensors(kept())
    assert tensors.keys() == {"velocity", "velocity.ids"}
    found = from_tensors(tensors)
    again = to_tensors({client: found[client] for client in sorted(found, reverse=True)})
    assert all(torch.equal(again[name], tensors[name]) for name in tensors | again)
    assert from_tensors({}) == {}
    assert to_tensors({}) == {}


def test_a_checkpoint_of_before_is_read_whatever_its_order() -> None:
    """Older versions stored clients in the order in which they first trained."""
    rows = torch.arange(6.0).view(2, 3)
    found = from_tensors({"velocity": rows, "velocity.ids": torch.tensor([7, 2])})
    assert torch.equal(found[7]["velocity"], rows[0])
    assert torch.equal(found[2]["velocity"], rows[1])


def test_what_trainers_keep_may_differ_in_shape_and_go() -> None:
    """Such as one loss per example. A client whose state is now empty is not in the checkpoint."""
    memory: ClientStates = {}
    for client, size in ((1, 2), (2, 5), (3, 2)):
        memory = replace_states(memory, {client: {"losses": torch.full((size,), client)}})
    memory = replace_states(memory, {4: {"count": torch.ones(1, dtype=torch.int64)}})
    found = from_tensors(to_tensors(replace_states(memory, {4: {}})))
    losses = {client: own["losses"].tolist() for client, own in sorted(found.items())}
    assert losses == {1: [1, 1], 2: [2] * 5, 3: [3, 3]}
