"""A client's training on a GPU is that of the CPU, up to rounding."""

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
#: Of float64: roundings.
SAME = 1e-10


def seeded(*layers: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a chain with weights of a generator of its own."""
    model, generator = nn.Sequential(*layers).to(dtype), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a network with a convolution, statistics of batches, and dropout."""
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3))
    return seeded(*layers, nn.Flatten(), nn.Linear(100, 2), dtype=dtype)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return one whose examples are apart."""
    layers = (nn.Flatten(), nn.Linear(25, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
    return seeded(*layers, dtype=dtype)


def examples(count: int = 29) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 1, 5, 5, generator=generator, dtype=torch.float64)
    return features, torch.randint(0, 2, (count,), generator=generator)


@dataclass
class Control:
    """Keeps what is saved, as bytes on a disk would; ends the task after some steps.

    Attributes:
        kept: What was saved last.
        steps: After which the task is cut off; ``None``: never.
    """

    kept: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int | None = None

    def check(self) -> None:
        """End the task where it is to be cut off."""
        if self.steps == 0:
            raise KeyboardInterrupt

    def report(self, *, fraction: float, loss: float) -> None:
        """Count a step."""
        if self.steps is not None:
            self.steps -= 1

    def load(self) -> Mapping[str, Tensor]:
        """Return what was saved last."""
        return self.kept

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep a copy."""
        self.kept = {name: value.detach().cpu().clone() for name, value in tensors.items()}


def context_of(local: LocalUpdate, *, size: int, control: TaskControl = UNATTENDED) -> TrainContext:
    """Return what surrounds a training; all are told a control variate."""
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
    """Return the largest difference of what a client contributes or keeps."""
    ours, theirs = ((each.tensors, each.state, each.lanes) for each in (one, other))
    differences = [
        (mine[name].cpu() - its[name].cpu()).abs().max()
        for mine, its in zip(ours, theirs, strict=True)
        for name in mine.keys() | its.keys()
    ]
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_gpu_is_taken_by_its_number(gpu: torch.device, name: str) -> None:
    """The model's tensors say the same of themselves as the trainer."""
    trainer, params = TorchTrainer.of(mlp, *examples(), device=name), Params.of(mlp())
    context = context_of(SGD, size=params.layout.num_trainable)
    result = trainer.train(params.to_tensors(), context=context)
    assert trainer.device == gpu
    assert {value.device for value in result.tensors.values()} == {gpu}


def test_a_gpu_that_is_not_there_is_refused() -> None:
    """Before anything is put on it."""
    name = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=f'device is "{name}", but torch sees'):
        TorchTrainer.of(mlp, *examples(), device=name)


@pytest.mark.parametrize("local", [SGD, SCAFFOLD], ids=["momentum", "scaffold"])
def test_training_is_that_of_the_cpu(local: LocalUpdate) -> None:
    """To roundings of float64: masks of dropout are the same; what is kept and told, too."""
    found, expected = result_of(local, "cuda"), result_of(local, "cpu")
    assert apart(found, expected) < SAME
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=SAME)
    assert apart(found, result_of(local, "cpu", max_steps=1)) > 1e-3  # the control


def test_batches_in_parts_and_from_a_dataset_are_those_of_the_cpu() -> None:
    """Rows that are read one by one go to the GPU, too."""
    expected = result_of(SGD, "cpu", make=mlp, gradient_accumulation=3)
    trainer = TorchTrainer.of(
        mlp, TensorDataset(*examples()), device="cuda", gradient_accumulation=3
    )
    params = Params.of(mlp())
    context = context_of(SGD, size=params.layout.num_trainable)
    found = trainer.train(params.to_tensors(), context=context)
    assert apart(found, expected) < SAME


def test_examples_clipped_one_by_one_are_those_of_the_cpu() -> None:
    """With next to no noise; the control: without the clip it is another model."""
    local = NoisedGradients(inner=SGD, example_clip_norm=0.3, example_noise_multiplier=1e-9)
    found, expected = (result_of(local, device, make=mlp) for device in ("cuda", "cpu"))
    assert apart(found, expected) < 1e-4  # sums are cut to levels, 2**20 of them up to the clip
    assert apart(found, result_of(SGD, "cpu", make=mlp)) > 1e-2


def test_noise_on_the_gpu_is_there() -> None:
    """New in each training; half the clip in all is far above what a level is."""
    local = NoisedGradients(inner=SGD, example_clip_norm=0.3, example_noise_multiplier=1.0)
    assert apart(*(result_of(local, "cuda", make=mlp) for _ in range(2))) > 1e-3


class Drawing(nn.Module):
    """A model that draws from the generator of where it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Add noise to the features."""
        found: Tensor = self.layer(x + 0.1 * torch.randn_like(x))
        return found


def test_draws_follow_the_seed_and_leave_the_gpus_generator_alone() -> None:
    """A step's draws are a function of its key: what was drawn before changes nothing."""
    first = result_of(SGD, "cuda", make=Drawing)
    torch.rand(7, device="cuda")
    before = torch.cuda.get_rng_state()
    again = result_of(SGD, "cuda", make=Drawing)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert apart(first, again) < SAME


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_task_that_was_cut_off_on_a_gpu_goes_on(device: str) -> None:
    """On the GPU or on the CPU; the control: from the beginning it takes all steps again."""
    cut = Control(steps=3)
    with pytest.raises(KeyboardInterrupt):
        result_of(SGD, "cuda", control=cut)
    assert cut.kept
    rest = Control(kept=cut.kept, steps=100)
    found = result_of(SGD, device, control=rest)
    assert apart(found, result_of(SGD, "cuda")) < SAME
    assert rest.steps == 100 - (8 - 3)


def test_mixed_precision_is_close() -> None:
    """Of 8 bits; parameters stay what they are."""
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
    """Delta and lanes, clipped together, as bytes; what is kept can be written, too."""
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
