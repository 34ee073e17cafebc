"""Checks of a model and its examples for a mesh, before any process is started."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedlearn.algorithms.objectives import CustomLoss
from fedlearn.core.features import Features
from fedlearn.errors import ConfigError, DataError
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import Sgd
from fedlearn.parallel.parts import Cut, stage_of
from fedlearn.parallel.task import Task
from tests.trainings import BATCH_SIZE, NUM_EXAMPLES, InOrder, alone, task_of, transformer

PAIR = Mesh(replicate=2)
STAGES: dict[str, Any] = {"mesh": Mesh(pipeline=2), "num_micro_batches": 2}


def of(model: Callable[[], nn.Module], **settings: Any) -> Task:  # Any: as of task_of
    return replace(task_of(**settings), make_model=model)


def build_normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(8))))


def frozen() -> nn.Module:
    return build_normalized().eval()  # a training puts it into training mode again


class NoChain(nn.Module):
    """Two layers that are not in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)


class WrongCut(nn.Module):
    """A module that declares a cut of a layer without a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def tensor_cuts(self) -> Mapping[str, Cut]:
        return {"norm": Cut(along="rows")}


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def build_tied() -> nn.Sequential:
    chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    chain[2].weight = chain[0].weight
    return chain


def build_tied_inside() -> nn.Module:
    return nn.Sequential(build_tied(), nn.Linear(2, 2))


def half_frozen() -> nn.Module:
    chain = odd()
    chain.get_submodule("0").requires_grad_(False)
    return chain


class Scaled(nn.Module):
    """A layer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))


GPIPE: dict[str, Any] = {"mesh": Mesh(pipeline=2), "schedule": "gpipe"}
SHARDS = Mesh(shard=2)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (build_normalized, GPIPE, r"layer 1\.norm .* keeps batch statistics, .* set pipeline to 1"),
        (build_normalized, {"recompute": True}, r"layer 1\.norm .* twice.* recompute to false"),
        (build_tied, STAGES, r"'0\.weight' and '2\.weight' are one .* mesh pipeline 2 .* be two"),
        (build_tied, {"mesh": Mesh(tensor=2)}, r"'0\.weight' and '2\.weight' are one parameter"),
        (half_frozen, STAGES, r"stage 0 \(0\.weight, 0\.bias\) is frozen"),
        (Scaled, {"mesh": SHARDS}, r"'scale' is a scalar .* cannot be sharded; .* shape \[1\]"),
        (
            build_normalized,
            {"mesh": PAIR},
            r"layer 1\.norm \(BatchNorm1d\) .* in 2 parts.*GroupNorm",
        ),
        (frozen, {"num_micro_batches": 4}, r"layer 1\.norm \(BatchNorm1d\) .* in 4 parts"),
        (NoChain, STAGES, "pipeline is 2, but the model is a NoChain, .* nn.Sequential"),
        (
            odd,
            {"mesh": Mesh(pipeline=3), "num_micro_batches": 4},
            "pipeline is 3, but the model has 2 layers .* set pipeline to at most 2",
        ),
        (
            NoChain,
            {"mesh": Mesh(tensor=2)},
            "tensor is 2, but the model has neither two linear layers",
        ),
        (
            odd,
            {"mesh": Mesh(tensor=4)},
            "tensor is 4, but layer '0' has 6 columns, .* a degree that divides 6",
        ),
        (
            transformer,
            {"mesh": Mesh(tensor=8)},
            "tensor is 8, but layer '1.query' has 16 columns of 4 together, .* divides 4",
        ),
        (WrongCut, {"mesh": Mesh(tensor=2)}, "names 'norm', a LayerNorm; only nn.Linear is cut"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    model: Callable[[], nn.Module], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        of(model, **settings).require_fitting()


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (build_normalized, {}),
        (NoChain, {"mesh": PAIR}),
        (odd, {"mesh": Mesh(tensor=3)}),
        (build_tied, {"mesh": PAIR}),
        (build_tied, {"mesh": SHARDS}),
        (build_tied_inside, {"mesh": SHARDS}),
        (build_tied_inside, STAGES),
        (half_frozen, {"mesh": SHARDS}),
        (Scaled, {"mesh": PAIR}),
        (odd, STAGES),
        (transformer, {"mesh": Mesh(tensor=4)}),
    ],
)
def test_a_model_that_fits_is_taken(
    model: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    of(model, **settings).require_fitting()


def test_statistics_of_batches_would_hang_on_the_mesh() -> None:
    """This is why they are refused: training in parts would give a different model."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 4)).double()

    assert alone(of(model)).apart(alone(of(model, num_micro_batches=4))) > 1e-3


def test_a_model_that_is_frozen_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter to train: all are frozen"):
        alone(of(lambda: odd().requires_grad_(False)))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.full((24,), 99), r"labels \(\d+,\) torch.int64: a label is not among .*: Target 99"),
        (torch.zeros(24).double(), r"labels \(\d+,\) torch.float64: softmax cross-entropy takes"),
    ],
    ids=["a class too many", "numbers"],
)
def test_examples_that_the_loss_cannot_take_are_told_of(labels: Tensor, said: str) -> None:
    """As a DataError, since restarted ranks would fail the same way."""
    task = task_of()
    task = replace(task, stream=replace(InOrder.small(), labels=labels))
    with pytest.raises(DataError, match=f"of step 0, features .*{said}"):
        alone(task)


def test_a_model_that_cannot_take_the_examples_is_told_of() -> None:
    with pytest.raises(DataError, match=r"of step 0, .*mat1 and mat2 .*change the data"):
        alone(of(lambda: odd().double()))


def test_a_loss_that_couples_examples_is_not_cut() -> None:
    coupled = CustomLoss(lambda outputs, _: outputs.square().sum(), per_example=False)
    for settings in ({"mesh": PAIR}, {"num_micro_batches": 2}):
        task = replace(task_of(**settings), objective=coupled)
        with pytest.raises(ConfigError, match="would differ for a batch in 2 parts"):
            task.require_fitting()
    replace(task_of(mesh=Mesh(tensor=2)), objective=coupled).require_fitting()


def test_a_batch_is_no_larger_than_the_data() -> None:
    few = replace(task_of(), stream=InOrder(torch.zeros(15, 3, 8), torch.zeros(15).long()))
    with pytest.raises(ConfigError, match="batch_size is 16, but there are 15 examples"):
        few.require_fitting()


def test_a_pipeline_takes_one_input() -> None:
    @dataclass(frozen=True)
    class Several:
        def __len__(self) -> int:
            return NUM_EXAMPLES

        def batch(self, positions: range) -> tuple[Features, Tensor]:
            rows = torch.zeros(len(positions), 3, 8)
            return {"ids": rows, "mask": rows}, torch.zeros(len(positions), dtype=torch.int64)

    task = replace(task_of(**STAGES), stream=Several())
    with pytest.raises(ConfigError, match=r"input 'ids', input 'mask'.* set pipeline to 1"):
        task.require_fitting()
    replace(task_of(mesh=PAIR), stream=Several()).require_fitting()


def test_stages_are_as_even_as_can_be_and_keep_names() -> None:
    model = transformer()
    stages = [stage_of(model, index, 2) for index in range(2)]
    names = [name for stage in stages for name in stage.state_dict()]
    assert names == list(model.state_dict())
    sizes = [sum(each.numel() for each in stage.parameters()) for stage in stages]
    assert max(sizes) < 0.6 * sum(sizes)


def test_a_sum_of_gradients_with_the_rate_over_p_is_their_mean() -> None:
    mean = task_of(optimizer="sgd")
    plan = replace(
        mean.plan, optimizer=Sgd(learning_rate=0.1, momentum=0.9), gradient_clip_norm=None
    )
    mean = replace(mean, plan=plan)
    num_shares = 4

    def sum_losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return num_shares * nn.functional.cross_entropy(outputs, labels, reduction="none")

    rate = Sgd(learning_rate=0.1 / num_shares, momentum=0.9)
    total = replace(mean, objective=CustomLoss(sum_losses), plan=replace(plan, optimizer=rate))
    ours, theirs = alone(mean).model, alone(total).model
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-12


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_to_compute_again_keeps_less_and_changes_no_bit(dropout: float) -> None:
    def measure_kept_bytes(task: Task) -> int:
        sizes = list[int]()

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        engine = RankTrainer(task, device=torch.device("cpu"))
        features, _ = task.stream.batch(range(BATCH_SIZE))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            engine._wrapped.called(features)  # noqa: SLF001 (the module under test)
        return sum(sizes)

    whole, again = (task_of(dropout=dropout, recompute=each) for each in (False, True))
    assert measure_kept_bytes(again) < 0.2 * measure_kept_bytes(whole)
    assert alone(again).apart(alone(whole)) == 0.0
