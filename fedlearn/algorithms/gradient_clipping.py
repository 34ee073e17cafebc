"""Gradient clipping in local training, by the norm of the batch's gradient."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import doc

from fedlearn.algorithms.local import LocalUpdateWrapper, Memory, Moment, Tensors
from fedlearn.core.ranges import Positive, Ranged


@dataclass(frozen=True, kw_only=True)
class ClippedGradients(Ranged, LocalUpdateWrapper):
    r"""Scales each step's gradient :math:`g` by :math:`\min(1, C / \|g\|_2)`.

    C is ``gradient_clip_norm``. The norm is that of all trainable parameters
    together, as of ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> sgd = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=1.0)
        >>> clipped = fl.ClippedGradients(inner=sgd, gradient_clip_norm=1.0)
        >>> x, gradients = [torch.zeros(1, 2)], [torch.tensor([[3.0, 4.0]])]  # a gradient of norm 5
        >>> clipped.step(x, gradients, {}, broadcast={}, moment=fl.Moment(round_num=0, step=0))
        >>> x
        [tensor([[-0.6000, -0.8000]])]

    References:
        Pascanu, Mikolov and Bengio, 2013, `On the Difficulty of Training Recurrent Neural
        Networks <https://arxiv.org/abs/1211.5063>`_, algorithm 1.
    """

    takes_flat: ClassVar[bool] = True

    gradient_clip_norm: Annotated[Positive, doc("Gradients are clipped to this norm, > 0.")]

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step by clipped gradients."""
        norms_GK = torch.stack(
            [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in grads]
        )
        norm_K = torch.linalg.vector_norm(norms_GK, dim=0)
        # C / 0 is infinite and clamps to 1, so a zero gradient is not scaled. A gradient that is
        # not finite stays so, and the client fails.
        scale_K = (self.gradient_clip_norm / norm_K).clamp(max=1.0)
        clipped = [g * scale_K.view(-1, *[1] * (g.dim() - 1)) for g in grads]
        self.inner.step(x, clipped, memory, broadcast=broadcast, moment=moment)
