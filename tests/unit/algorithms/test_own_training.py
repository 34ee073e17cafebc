"""OwnTraining: the clients' own trainers decide how to train, the settings only how much."""

import numpy as np
import pytest
import torch

from fedlearn.algorithms.local import LocalUpdate, Moment, find_affine_step
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.settings import require_honored, settings_of
from fedlearn.errors import SettingsRefused


def test_it_is_a_local_update_without_lanes_and_memory() -> None:
    """Clients send only the delta."""
    own = OwnTraining()
    assert isinstance(own, LocalUpdate)
    assert (list(own.lanes), dict(own.memory), find_affine_step(own)) == ([], {}, None)


def test_a_trainer_that_honors_nothing_is_asked_for_nothing() -> None:
    """A setting that is not at its default must be honored, and the message names it."""
    require_honored(settings_of(OwnTraining()), (), who="Mine")
    with pytest.raises(SettingsRefused, match=r"Mine does not honor the setting 'epochs'"):
        require_honored(settings_of(OwnTraining(epochs=2)), (), who="Mine")
    require_honored(settings_of(OwnTraining(epochs=2)), {"epochs"}, who="Mine")


def test_virtual_time_knows_how_much_it_is() -> None:
    """Virtual time counts steps by epochs and batch size, as for any update."""
    own = OwnTraining(epochs=2, batch_size=4)
    assert own.work.num_steps(np.asarray([4, 5])).tolist() == [2, 4]


def test_a_standard_trainer_does_not_know_how() -> None:
    """The message suggests the fix."""
    x = [torch.zeros(1, 2)]
    with pytest.raises(ValueError, match=r"their own trainer"):
        OwnTraining().step(x, x, {}, broadcast={}, moment=Moment(round_num=0, step=0))


def test_how_much_it_does_is_checked() -> None:
    with pytest.raises(ValueError, match="epochs"):
        OwnTraining(epochs=0)
