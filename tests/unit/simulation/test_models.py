"""The reference networks map shapes to shapes."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedlearn.errors import ConfigError
from fedlearn.simulation.models import Cnn, Logistic, Mlp


@pytest.mark.parametrize("shape", [(64,), (1, 28, 28), (3, 8, 5)])
def test_every_network_maps_a_batch_to_its_outputs(shape: tuple[int, ...]) -> None:
    """Features of any shape are flattened; images may be small, colored and rectangular."""
    makers: list[Callable[[], nn.Module]] = [
        Logistic(feature_shape=shape, num_outputs=7),
        Mlp(feature_shape=shape, hidden=(5, 6), num_outputs=7),
    ]
    if len(shape) == 3:
        makers.append(Cnn(feature_shape=shape, num_outputs=7))
    for make in makers:
        assert make()(torch.zeros(4, *shape)).shape == (4, 7)


def test_the_hidden_layers_are_those_asked_for() -> None:
    """Three linear layers for two hidden widths, one for none."""
    network = Mlp(feature_shape=(4,), hidden=(5, 6), num_outputs=2)()
    widths = [layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear)]
    assert widths == [5, 6, 2]


def test_each_call_builds_a_new_network() -> None:
    """The factory holds no network, so it can be printed, compared and pickled."""
    piece = Logistic(feature_shape=(3,), num_outputs=2)
    assert piece() is not piece()
    assert pickle.loads(pickle.dumps(piece)) == piece  # noqa: S301  our own bytes


@pytest.mark.parametrize("shape", [(64,), (28, 28), (1, 3, 28), (1, 28, 3), (1, 1, 28, 28)])
def test_a_cnn_on_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    """The message has the shape and suggests another model."""
    with pytest.raises(ConfigError, match=r'"cnn" needs images .* shape \[.*use "mlp"'):
        Cnn(feature_shape=shape, num_outputs=10)
