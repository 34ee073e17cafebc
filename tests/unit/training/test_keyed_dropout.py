"""Dropout masks as a function of a key."""

import pytest
import torch
from torch import nn

from fedlearn.core.randomness import Seed
from fedlearn.training.keyed_dropout import (
    KeyedDropout,
    KeyedDropouts,
    preserve_generator,
    share_key,
    step_keys,
)


def network(rate: float = 0.5) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(rate), nn.Sequential(nn.Dropout(rate), nn.Identity()))


def drop_values(model: nn.Module, dropouts: KeyedDropouts, *, seed: int, step: int) -> torch.Tensor:
    dropouts.set_key(int(step_keys([Seed(seed)], step + 1)[0, step]))
    ones: torch.Tensor = model(torch.ones(64, 100))
    return ones


def test_the_same_key_drops_the_same_units() -> None:
    """Another seed or step drops others; nothing is drawn from a generator."""
    model = network()
    dropouts = KeyedDropouts(model)
    before = torch.random.get_rng_state()
    first = drop_values(model, dropouts, seed=0, step=0)
    assert torch.equal(drop_values(model, dropouts, seed=0, step=0), first)
    assert not torch.equal(drop_values(model, dropouts, seed=0, step=1), first)
    assert not torch.equal(drop_values(model, dropouts, seed=1, step=0), first)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout1d(0.5)])
@pytest.mark.parametrize("rows_each", [1, 3])
def test_shares_of_a_batch_have_their_part_of_its_masks(layer: nn.Module, rows_each: int) -> None:
    """With one row an example or several; without offsets they would all get the first masks."""
    model = nn.Sequential(layer)
    dropouts, whole = KeyedDropouts(model), torch.ones(7 * rows_each, 20, 2)
    dropouts.set_key(11)
    expected = model(whole)
    for first, last in ((0, 2), (2, 3), (3, 7)):
        rows = slice(first * rows_each, last * rows_each)
        dropouts.set_key(11, first=first, num_rows=last - first)
        assert torch.equal(model(whole[rows]), expected[rows])
        dropouts.set_key(11)
        assert torch.equal(model(whole[rows]), expected[rows]) == (first == 0)


def test_what_is_no_batch_has_one_mask_for_all_shares() -> None:
    """Weights of a layer are such a tensor: their rows are not examples."""
    model = nn.Sequential(nn.Dropout(0.5))
    dropouts, weights = KeyedDropouts(model), torch.ones(5, 20)
    dropouts.set_key(11)
    expected = model(weights)
    dropouts.set_key(11, first=4, num_rows=3)
    assert torch.equal(model(weights), expected)


def test_shares_draw_from_a_generator_by_keys_of_their_own() -> None:
    """The first share uses the step's key; keys stay within 32 bits."""
    keys = [share_key(12345, first) for first in range(100)]
    assert keys[0] == 12345
    assert len(set(keys)) == 100
    assert all(0 <= key < 2**32 for key in keys)


def test_layers_drop_different_units() -> None:
    """With one key for both, the product would keep half of the units instead of a quarter."""
    model = network()
    kept = drop_values(model, KeyedDropouts(model), seed=0, step=0) != 0.0
    assert abs(float(kept.float().mean()) - 0.25) < 0.03


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_and_the_scale_are_those_of_torch(rate: float) -> None:
    """About ``rate`` of the units are zero, the others are scaled by 1 / (1 - rate)."""
    model = nn.Sequential(nn.Dropout(rate))
    outputs = drop_values(model, KeyedDropouts(model), seed=3, step=0)
    share = float((outputs == 0.0).float().mean())
    assert abs(share - rate) < 4 * (rate * (1 - rate) / outputs.numel()) ** 0.5
    assert bool(torch.isclose(outputs[outputs != 0.0], torch.tensor(1 / (1 - rate))).all())


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_extreme_rates_keep_all_or_nothing(rate: float, expected: float) -> None:
    """No division by zero."""
    model = nn.Sequential(nn.Dropout(rate))
    outputs = drop_values(model, KeyedDropouts(model), seed=3, step=0)
    assert bool((outputs == expected).all())


def test_whole_channels_are_dropped_where_the_layer_says_so() -> None:
    """Dropout2d: a channel is zero or whole."""
    model = nn.Sequential(nn.Dropout2d(0.5))
    dropouts = KeyedDropouts(model)
    dropouts.set_key(int(step_keys([Seed(0)], 1)[0, 0]))
    per_channel = model(torch.ones(32, 8, 3, 3)).flatten(2)
    assert bool((per_channel == per_channel[..., :1]).all())
    assert 0.3 < float((per_channel[..., 0] == 0.0).float().mean()) < 0.7


def test_nothing_is_dropped_in_evaluation() -> None:
    """As in torch; installing the masks does not change a layer's mode."""
    model = network().eval()
    dropouts = KeyedDropouts(model)
    assert bool((drop_values(model, dropouts, seed=0, step=0) == 1.0).all())
    assert len(dropouts) == 2
    assert sum(isinstance(each, KeyedDropout) for each in model.modules()) == 2


def test_a_models_own_draws_leave_the_global_generator_alone() -> None:
    """Its state is restored even if the block raises."""
    generator = torch.default_generator
    before = generator.get_state()

    def failing() -> None:
        with preserve_generator(generator):
            generator.manual_seed(int(step_keys([Seed(0)], 2)[0, 1]))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        failing()
    assert torch.equal(generator.get_state(), before)
