"""A client's training on a GPU matches the CPU's up to rounding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.metrics import BinaryAuc, Metric
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, TrainReply, TrainRequest
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.session.results import train_and_reply
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import UNATTENDED, LocalResult, TaskControl, TrainContext

SGD = LocalSgd(epochs=2, batch_size=8, learning_rate=0.1, momentum=0.9, keep_momentum=True)
SCAFFOLD = ControlVariates(
    inner=LocalSgd(epochs=2, batch_size=8, learning_rate=0.1), control_bound=None
)
#: Tolerance for rounding in float64.
SAME = 1e-10


def build_seeded(*layers: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a chain whose weights come from a separate generator."""
    model, generator = nn.Sequential(*layers).to(dtype), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a network with a convolution, batch statistics, and dropout."""
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3))
    return build_seeded(*layers, nn.Flatten(), nn.Linear(100, 2), dtype=dtype)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a network in which examples do not interact."""
    layers = (nn.Flatten(), nn.Linear(25, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
    return build_seeded(*layers, dtype=dtype)


def examples(count: int = 29) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 1, 5, 5, generator=generator, dtype=torch.float64)
    return features, torch.randint(0, 2, (count,), generator=generator)


@dataclass
class Control:
    """A control that stores checkpoints in main memory, as a disk would, and can end the task.

    Attributes:
        kept: The latest checkpoint.
        steps: Steps after which the task is interrupted; ``None``: never.
    """

    kept: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int | None = None

    def check(self) -> None:
        """Interrupt the task if it is due."""
        if self.steps == 0:
            raise KeyboardInterrupt

    def report(self, *, fraction: float, loss: float) -> None:
        """Count a step."""
        if self.steps is not None:
            self.steps -= 1

    def load(self) -> Mapping[str, Tensor]:
        """Return the latest checkpoint."""
        return self.kept

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Store a copy on the CPU."""
        self.kept = {name: value.detach().cpu().clone() for name, value in tensors.items()}


def context_of(local: LocalUpdate, *, size: int, control: TaskControl = UNATTENDED) -> TrainContext:
    """Return a training context; its broadcast always has a control variate."""
    return TrainContext(
        client_id=ClientId(1),
        round_num=2,
        settings=settings_of(local),
        seed=Seed(5),
        state={},
        broadcast={"control": torch.linspace(-0.1, 0.1, size, dtype=torch.float64)},
        control=control,
    )


def result_of(
    local: LocalUpdate,
    device: str,
    *,
    make: Callable[[], nn.Module] = make_model,
    control: TaskControl = UNATTENDED,
    **options: Any,  # as of TorchTrainer.of
) -> LocalResult:
    """Train for one round on a device."""
    trainer = TorchTrainer.of(make, *examples(), device=device, **options)
    params = Params.of(make())
    context = context_of(local, size=params.layout.num_trainable, control=control)
    return trainer.train(params.to_tensors(), context=context)


def apart(one: LocalResult, other: LocalResult) -> float:
    """Return the largest difference of deltas or client states."""
    ours, theirs = ((each.tensors, each.state, each.lanes) for each in (one, other))
    differences = [
        (mine[name].cpu() - its[name].cpu()).abs().max()
        for mine, its in zip(ours, theirs, strict=True)
        for name in mine.keys() | its.keys()
    ]
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_gpu_is_taken_by_its_number(gpu: torch.device, name: str) -> None:
    """The model's tensors and the trainer report the same device."""
    trainer, params = TorchTrainer.of(mlp, *examples(), device=name), Params.of(mlp())
    context = context_of(SGD, size=params.layout.num_trainable)
    result = trainer.train(params.to_tensors(), context=context)
    assert trainer.device == gpu
    assert {value.device for value in result.tensors.values()} == {gpu}


def test_a_gpu_that_is_not_there_is_refused() -> None:
    """Before any tensor moves to it."""
    name = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=f'device is "{name}", but torch sees'):
        TorchTrainer.of(mlp, *examples(), device=name)


@pytest.mark.parametrize("local", [SGD, SCAFFOLD], ids=["momentum", "scaffold"])
def test_training_is_that_of_the_cpu(local: LocalUpdate) -> None:
    """Up to rounding in float64: dropout masks, client state and metrics agree as well."""
    found, expected = result_of(local, "cuda"), result_of(local, "cpu")
    assert apart(found, expected) < SAME
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=SAME)
    assert apart(found, result_of(local, "cpu", max_steps=1)) > 1e-3  # the control


def test_batches_in_parts_and_from_a_dataset_are_those_of_the_cpu() -> None:
    """Rows that are read one by one move to the GPU too."""
    expected = result_of(SGD, "cpu", make=mlp, gradient_accumulation=3)
    trainer = TorchTrainer.of(
        mlp, TensorDataset(*examples()), device="cuda", gradient_accumulation=3
    )
    params = Params.of(mlp())
    context = context_of(SGD, size=params.layout.num_trainable)
    found = trainer.train(params.to_tensors(), context=context)
    assert apart(found, expected) < SAME


def test_examples_clipped_one_by_one_are_those_of_the_cpu() -> None:
    """With negligible noise; control: without the clip the model differs."""
    local = NoisedGradients(inner=SGD, example_clip_norm=0.3, example_noise_multiplier=1e-9)
    found, expected = (result_of(local, device, make=mlp) for device in ("cuda", "cpu"))
    assert apart(found, expected) < 1e-4  # sums are rounded to levels, 2**20 of them up to the clip
    assert apart(found, result_of(SGD, "cpu", make=mlp)) > 1e-2


def test_noise_on_the_gpu_is_there() -> None:
    """It differs in each training, and half of the clip is far more than a level."""
    local = NoisedGradients(inner=SGD, example_clip_norm=0.3, example_noise_multiplier=1.0)
    assert apart(*(result_of(local, "cuda", make=mlp) for _ in range(2))) > 1e-3


class Drawing(nn.Module):
    """A model that draws from its device's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Add noise to the features."""
        found: Tensor = self.layer(x + 0.1 * torch.randn_like(x))
        return found


def test_draws_follow_the_seed_and_leave_the_gpus_generator_alone() -> None:
    """A step's draws depend only on its key, not on earlier draws."""
    first = result_of(SGD, "cuda", make=Drawing)
    torch.rand(7, device="cuda")
    before = torch.cuda.get_rng_state()
    again = result_of(SGD, "cuda", make=Drawing)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert apart(first, again) < SAME


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_task_that_was_cut_off_on_a_gpu_goes_on(device: str) -> None:
    """On the GPU or on the CPU; control: from the beginning all steps run again."""
    cut = Control(steps=3)
    with pytest.raises(KeyboardInterrupt):
        result_of(SGD, "cuda", control=cut)
    assert cut.kept
    rest = Control(kept=cut.kept, steps=100)
    found = result_of(SGD, device, control=rest)
    assert apart(found, result_of(SGD, "cuda")) < SAME
    assert rest.steps == 100 - (8 - 3)


def test_mixed_precision_is_close() -> None:
    """Within 8 bits; parameters keep their dtype."""
    make = partial(mlp, torch.float32)
    expected = result_of(SGD, "cpu", make=make)
    found = result_of(SGD, "cuda", make=make, precision="bfloat16")
    assert 1e-5 < apart(found, expected) < 0.1
    assert {value.dtype for value in found.tensors.values()} == {torch.float32}


def auc(outputs: Tensor, labels: Tensor) -> Tensor:
    return BinaryAuc()(outputs[:, 1] - outputs[:, 0], labels)


def test_evaluation_is_that_of_the_cpu() -> None:
    """Means over examples, and a metric of the whole set."""
    metrics, weights = {"auc": Metric(auc, direction="max")}, Params.of(make_model()).to_tensors()
    found, expected = (
        TorchTrainer.of(make_model, *examples(), device=device, metrics=metrics)
        .evaluate(weights)
        .metrics
        for device in ("cuda", "cpu")
    )
    assert found == pytest.approx(expected, abs=SAME)
    assert {"loss", "accuracy", "auc"} <= found.keys()


def test_a_reply_leaves_the_gpu() -> None:
    """Delta and lanes are clipped together and become bytes; client state can be saved as well."""
    local, clip = SCAFFOLD, ClippedUpdates(update_clip_norm=0.1)
    params = Params.of(make_model())
    context = context_of(local, size=params.layout.num_trainable)
    request = TrainRequest(
        round_num=2,
        attempt=0,
        tensors=params.to_tensors(),
        order=tuple(spec.name for spec in params.layout.specs),
        settings=settings_of(local, [clip]),
        seed=5,
        broadcast=context.broadcast,
    )
    replies = []
    for device in ("cuda", "cpu"):
        trainer = TorchTrainer.of(make_model, *examples(), device=device)
        context = replace(context, settings=request.settings)
        reply, kept = train_and_reply(trainer, request, context=context)
        assert {value.device.type for value in reply.lanes.values()} == {"cpu"}
        assert save(kept)
        replies.append(decode(encode(reply)))
    found, expected = replies
    assert isinstance(found, TrainReply)
    assert isinstance(expected, TrainReply)
    for name, value in expected.lanes.items():
        torch.testing.assert_close(found.lanes[name], value, rtol=0.0, atol=SAME)
