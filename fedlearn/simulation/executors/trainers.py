"""Trains clients one after another with a custom trainer."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.extra_settings import split_settings
from fedlearn.algorithms.lanes import DELTA, describe_misfit, list_model_lanes
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.features import cast_for_trainer, take_rows
from fedlearn.core.messages import ClientId, TrainRequest
from fedlearn.errors import Diverged, UnusableResult
from fedlearn.session.results import train_and_reply
from fedlearn.simulation.executors.base import TrainedBlock, Work
from fedlearn.training.trainer import LocalTrainer, TrainContext, require_trainer

#: Creates the trainer of one client from its features [n, ...] and labels [n, ...].
MakeTrainer = Callable[[Any, Tensor], LocalTrainer]  # Any: one tensor or several, by the data


class TrainerExecutor:
    """Trains blocks of one client, in the same way as a client session.

    Args:
        make_trainer: A custom function.
    """

    def __init__(self, make_trainer: MakeTrainer) -> None:
        self._make_trainer = make_trainer

    def train(self, work: Work) -> TrainedBlock:
        """Train the client and return its delta and loss.

        Raises:
            SettingsRefused: The trainer would ignore some of the training settings.
            UnusableResult: The trainer returned a result that a coordinator would refuse, such as
                other lanes than the local update declares.
            ValueError: The block has several clients.
        """
        (client_id,) = work.client_ids.tolist()
        index = torch.from_numpy(work.rows_K[0]).to(work.labels.device)
        request, like = _request(work), work.params.vector
        features = cast_for_trainer(take_rows(work.features, index), like.dtype)
        labels = work.labels.index_select(0, index)
        # Copies: the trainer may keep them, and the engine writes the next block's state there.
        state = {name: rows[0].clone() for name, rows in work.client_state.items()}
        trainer = require_trainer(self._make_trainer(features, labels))
        settings, extra = split_settings(request.settings)
        context = TrainContext(
            client_id=ClientId(client_id),
            round_num=request.round_num,
            settings=settings,
            extra=extra,
            seed=work.seed,
            state=state,
            broadcast=request.broadcast,
        )
        try:
            reply, client_state = train_and_reply(trainer, request, context=context)
        # NaN deltas make the engine refuse the update with the reason that a coordinator would
        # give.
        except Diverged:
            layout = work.params.layout
            return TrainedBlock(
                deltas_KP=torch.full_like(like, math.nan)[None],
                lanes={
                    lane.name: like.new_full((1, lane.size(layout)), math.nan)
                    for lane in work.local.lanes
                },
                losses_K=np.asarray([math.nan]),
                num_examples_K=work.num_examples(),
                client_state={},
            )
        specs = (*list_model_lanes(work.params.layout), *work.local.lanes)
        if (problem := describe_misfit(reply.lanes, specs, work.params.layout)) is not None:
            raise UnusableResult(
                f"{type(trainer).__name__} returned an update that does not fit: {problem}"
            )
        lanes = {name: vector.to(like) for name, vector in reply.lanes.items()}
        return TrainedBlock(
            deltas_KP=lanes.pop(DELTA.name, like)[None],  # a query has none: `like` is empty
            lanes={name: vector[None] for name, vector in lanes.items()},
            losses_K=np.asarray([float(reply.metrics.get("loss", math.nan))]),
            num_examples_K=np.asarray([reply.num_examples]),
            client_state={name: value[None] for name, value in client_state.items()},
            metrics_K=[reply.metrics],
        )


def _request(work: Work) -> TrainRequest:
    return TrainRequest(
        round_num=work.round_num,
        # A trainer does not see the attempt, so any number will do.
        attempt=0,
        tensors=work.params.to_tensors(),
        order=tuple(spec.name for spec in work.params.layout.specs),
        settings=settings_of(work.local),
        seed=work.seed.value,
        broadcast=work.broadcast,
        num_statistics=len(work.params.layout.statistics),
    )
