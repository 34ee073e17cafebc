r"""Compression of the model that clients download.

The coordinator sends a quantized model and keeps its own. With the paper's symbols, where
:math:`g_i` is what client i contributes:

.. math::

    \hat w_t = \mathcal{C}(w_t), \qquad
    w_{t+1} = w_t + \text{step}\Big(\frac{1}{n} \sum_i (y_i(\hat w_t) - \hat w_t)\Big)

======================== ====================================================
symbol                   here
======================== ====================================================
:math:`w_t`              the coordinator's model
:math:`\hat w_t`         what clients restore, train from and subtract
:math:`y_i(\hat w_t)`    the local model of client i
:math:`\mathcal{C}`      ``compressor``, which is right on average
======================== ====================================================

The whole model is compressed, and not its change since the last round, because a client that missed
rounds has no model to which the change could be added.

The coordinator never loses what it did not send: :math:`w_t - \hat w_t` stays in its model, so this
is error feedback, and changes that are smaller than a level still add up. All clients of a round
get the same model. Running statistics, constants and broadcasts are sent whole, and so is the
model that clients evaluate.

References:
    Caldas et al., 2018, `Expanding the Reach of Federated Learning by Reducing Client Resource
    Requirements <https://arxiv.org/abs/1812.07210>`_, section 2 (lossy compression of the model
    that is sent to clients); Philippenko and Dieuleveut, 2021, `Preserved central model for faster
    bidirectional compression in distributed settings <https://arxiv.org/abs/2102.12528>`_ (why the
    coordinator keeps its own).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from fedlearn.algorithms.compression import Compressor, Parts, Shapes, Target
from fedlearn.algorithms.settings import compressor_from
from fedlearn.algorithms.strategy import StrategyWrapper
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.messages import ClientId, TrainRequest
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, ProtocolError, UnusableResult


@dataclass(frozen=True)
class CompressedDownload(StrategyWrapper):
    """A strategy whose coordinator compresses the model that clients train.

    Attributes:
        inner: The wrapped strategy.
        compressor: How it does it.

    Raises:
        ConfigError: The compressor suits updates only, or has error feedback.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> fl.CompressedDownload(fl.FedAvg(local), fl.Quantized(bits=8)).download.bits
        8
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        name = type(self.compressor).__name__
        if not self.compressor.suits_models:
            raise ConfigError(
                f"{name} leaves out parts of an update, but clients need every number of the "
                "model; use Quantized"
            )
        if self.compressor.error_feedback:
            raise ConfigError(
                f"error_feedback of {name} is on, but the coordinator keeps its whole model, so "
                "nothing is lost that could be fed back; set it to false"
            )

    @property
    def download(self) -> Compressor:
        """The compressor of the model."""
        return self.compressor


def compress_model(
    params: Params, compressor: Compressor, *, seed: Seed, round_num: int
) -> tuple[Params, Parts]:
    """Compress a model; return it as clients restore it, and what is sent.

    Args:
        params: The coordinator's model.
        compressor: How its trained part is compressed.
        seed: The run's public seed.
        round_num: Round index.
    """
    layout = params.layout
    shapes = layout.trainable_shapes
    target = _build_target(shapes, dtype=layout.dtype, seed=seed, round_num=round_num)
    # On the CPU, as at the clients: a GPU may round a division differently.
    trained_Q = params.vector[: layout.num_trainable].cpu()
    rows, _ = compressor.compress(trained_Q[None], target, {})
    vector = params.vector.clone()
    vector[: layout.num_trainable] = compressor.decompress(rows, target)[0].to(vector.device)
    return params.with_vector(vector), {name: row[0] for name, row in rows.items()}


def restore_model(
    request: TrainRequest, *, known: Collection[type[Transform]] = ()
) -> TrainRequest:
    """Add the trained tensors to a request whose model came compressed.

    Args:
        request: A decoded request.
        known: Custom compressors that the coordinator may use.

    Raises:
        SettingsRefused: The compressor is not known, or not one for models.
        ProtocolError: The model cannot be restored.
    """
    sent = request.compressed
    if sent is None:
        return request
    compressor = compressor_from(sent.settings, known=known)
    statistics = request.order[len(request.trained) :]
    dtypes = {*sent.dtypes, *(request.tensors[name].dtype for name in statistics)}
    target = _build_target(
        sent.shapes,
        dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
        seed=Seed(request.seed),
        round_num=request.round_num,
    )
    try:
        vector_Q = compressor.restore_model(sent.parts, target)
    except UnusableResult as error:
        raise ProtocolError(f"the model that was sent cannot be restored: {error}") from error
    pieces = zip(vector_Q.split(target.sizes), sent.shapes, sent.dtypes, strict=True)
    # Copies, as of all tensors in a request.
    tensors = [part.view(shape).to(dtype, copy=True) for part, shape, dtype in pieces]
    trained = dict(zip(request.trained, tensors, strict=True))
    return replace(request, tensors={**trained, **request.tensors})


def _build_target(shapes: Shapes, *, dtype: torch.dtype, seed: Seed, round_num: int) -> Target:
    # All clients of a round get one model, so it is drawn for none of them.
    own = seed.derive("model", round_num)
    return Target(client_ids=[ClientId(0)], shapes=shapes, dtype=dtype, seed=own)
