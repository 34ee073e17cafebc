"""How a model is cut: into blocks, into stages of a pipeline, into columns and rows of matrices."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal, Protocol, runtime_checkable

from torch import nn
from torch.utils.checkpoint import checkpoint

from fedlearn.core.ranges import Count, Ranged
from fedlearn.errors import ConfigError
from fedlearn.parallel.mesh import Mesh

#: Layers that take each number by itself: what lies between two matrices that are cut.
_ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Dropout,
    nn.Identity,
)


@dataclass(frozen=True, kw_only=True)
class Cut(Ranged):
    """How the matrix of a linear layer is spread over the processes of a tensor degree.

    Attributes:
        along: "columns": each process has some of the outputs; "rows": each has some of the
            inputs, and the products are summed. A layer of columns is followed, number by
            number, by one of rows.
        unit: Outputs, or inputs, that stay together, such as those of an attention head, >= 1.

    References:
        Shoeybi et al., 2019, `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, section 3.
    """

    along: Literal["columns", "rows"]
    unit: Count = 1


@runtime_checkable
class CutsTensors(Protocol):
    """A module that says how its matrices are cut."""

    def tensor_cuts(self) -> Mapping[str, Cut]:
        """Return the cut of each linear layer that has one, by its name in the module."""


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model that are sharded, and recomputed, each as a whole, by name.

    The layers of a stack are blocks, wherever the stack is: two or more modules with parts of
    their own in an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential``, such as those of an
    encoder. Any other module with parameters is a block if no stack is inside it. A module that
    only wraps another one is looked through.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ModuleList([nn.Linear(2, 2)]))
        >>> list(blocks_of(model))
        ['0', '2.0']
        >>> layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> list(blocks_of(nn.Sequential(nn.Linear(3, 4), encoder)))
        ['0', '1.layers.0', '1.layers.1']
    """
    return dict(_blocks(module, ""))


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = {name: each for name, each in module.named_children() if _num_parameters(each)}
    if isinstance(module, nn.MultiheadAttention):  # uses its linear layer's weights, uncalled
        return
    for name, child in children.items():
        if _holds_blocks(child, in_stack=_is_stack(module), is_only=len(children) == 1):
            yield from _blocks(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _holds_blocks(module: nn.Module, *, in_stack: bool, is_only: bool) -> bool:
    """Return whether the blocks are inside a module, which then is none itself."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # nobody calls it
        return True
    if in_stack and not _is_chain(module):
        return False
    is_wrapper = is_only and _is_composite(module) and not in_stack and not _is_of_torch(module)
    return is_wrapper or any(_is_stack(each) for each in module.modules())


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module holds layers and does no more: at least two that have parts."""
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict) or _is_chain(module)
    return is_container and sum(_is_composite(each) for each in module.children()) > 1


def _is_composite(module: nn.Module) -> bool:
    return _num_parameters(module) > 0 and any(True for _ in module.children())


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether torch may use the parts of a module without calling them."""
    return type(module).__module__.startswith("torch.nn.") and not _is_chain(module)


def sharded_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks whose parameters are gathered together, by name.

    A parameter that two blocks share is gathered with the model itself: with either block, the
    other one would miss it.
    """
    blocks = blocks_of(module)
    owners = defaultdict[nn.Parameter, set[str]](set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners[parameter].add(_block_of(name, blocks))
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    return {name: block for name, block in blocks.items() if name not in shared}


def _block_of(parameter: str, blocks: Iterable[str]) -> str:
    """Return the name of the block that a parameter is in; empty: it is in none."""
    return next((name for name in blocks if parameter.startswith(f"{name}.")), "")


def recompute(module: nn.Module) -> None:
    """Have each block keep its input alone, and compute the rest again on the way back.

    References:
        Chen et al., 2016, `Training Deep Nets with Sublinear Memory Cost
        <https://arxiv.org/abs/1604.06174>`_.
    """
    for block in blocks_of(module).values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def stage_of(module: nn.Module, index: int, num_stages: int) -> nn.Module:
    """Return one stage of a model that is a chain; parameters keep their names.

    The stages have about as many parameters each: the largest is as small as can be.

    Args:
        module: An ``nn.Sequential``; what is not of the stage is left out, not copied.
        index: Which stage, from 0.
        num_stages: >= 1.

    Raises:
        ConfigError: The model is no chain, or has fewer layers with parameters than stages.

    Example:
        >>> chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
        >>> [[name for name, _ in stage_of(chain, at, 2).named_children()] for at in range(2)]
        [['0', '1'], ['2', '3']]
    """
    names = _stages(module, num_stages)[index]
    kept = OrderedDict((name, child) for name, child in module.named_children() if name in names)
    return nn.Sequential(kept).train(module.training)


def require_whole(module: nn.Module, mesh: Mesh) -> None:
    """Refuse parameters that a mesh would tear apart, or leave a process nothing to train.

    Args:
        module: The whole of it, which fits the mesh otherwise.
        mesh: Which.

    Raises:
        ConfigError: A stage has frozen parameters alone; a parameter that is to be sharded has no
            dimension; or layers share one that would not stay one: in two stages, or cut.
    """
    parts = [module]
    if mesh.pipeline > 1:
        parts = [stage_of(module, index, mesh.pipeline) for index in range(mesh.pipeline)]
    owner_of = dict[str, object]()
    for place, part in enumerate(parts):
        named = dict(part.named_parameters(remove_duplicate=False))
        if mesh.pipeline > 1 and not any(each.requires_grad for each in named.values()):
            raise ConfigError(
                f"pipeline is {mesh.pipeline}, but stage {place} ({', '.join(named)}) is frozen, "
                "and a stage trains something; lower pipeline"
            )
        cuts = cuts_of(part, mesh.tensor) if mesh.tensor > 1 else {}
        for name, each in named.items():
            if mesh.is_sharded and not each.dim():
                raise ConfigError(
                    f"parameter {name!r} is one number without a dimension, which cannot be "
                    "sharded; give it the shape [1], or set shard to 1"
                )
            is_cut = name.rpartition(".")[0] in cuts
            owner_of[name] = (place, name if is_cut else "")
    for names in _tied(module):
        if len({owner_of[name] for name in names}) > 1:
            raise ConfigError(
                f"{names[0]!r} and {names[1]!r} are one parameter, and on the mesh {mesh} they "
                "would be two; set pipeline and tensor to 1, put the layers that share it into one "
                "module of a stage, or make them two"
            )


def _tied(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, each in module.named_parameters(remove_duplicate=False):
        names[id(each)].append(name)
    return [found for found in names.values() if len(found) > 1]


def cuts_of(module: nn.Module, degree: int) -> dict[str, Cut]:
    """Return how each linear layer is spread over so many processes, by its name.

    A module that says so itself (:class:`CutsTensors`) is asked; in a chain, two linear layers
    with nothing but elementwise ones between them are a pair of columns and rows.

    Raises:
        ConfigError: There is none, one is no linear layer, or its width is not divided.

    Example:
        >>> chain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        >>> {name: cut.along for name, cut in cuts_of(chain, 2).items()}
        {'0': 'columns', '2': 'rows'}
    """
    cuts = dict(_cuts(module, ""))
    if not cuts:
        raise ConfigError(
            f"tensor is {degree}, but the model has no two linear layers in a chain, with nothing "
            "but elementwise layers between them, and no method tensor_cuts that names others; "
            "give it one, or set tensor to 1"
        )
    for name, cut in cuts.items():
        layer = module.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ConfigError(
                f"tensor_cuts names {name!r}, a {type(layer).__name__}; only nn.Linear is cut"
            )
        width = layer.out_features if cut.along == "columns" else layer.in_features
        if width % (degree * cut.unit):
            whole = "" if cut.unit == 1 else f" of {cut.unit} together"
            raise ConfigError(
                f"tensor is {degree}, but layer {name!r} has {width} {cut.along}{whole}, which "
                f"that does not divide; take a degree that divides {width // cut.unit}"
            )
    return cuts


def _cuts(module: nn.Module, prefix: str) -> Iterator[tuple[str, Cut]]:
    if isinstance(module, CutsTensors):
        for name, cut in module.tensor_cuts().items():
            yield prefix + name, cut
        return
    before: str | None = None
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and _is_chain(module):
            if before is not None:
                yield prefix + before, Cut(along="columns")
                yield prefix + name, Cut(along="rows")
            before = name if before is None else None
        elif not isinstance(child, _ELEMENTWISE):
            before = None
            yield from _cuts(child, f"{prefix}{name}.")


def _is_chain(module: nn.Module) -> bool:
    """Whether each child takes what the one before it returns."""
    return type(module).forward is nn.Sequential.forward


def _stages(module: nn.Module, num_stages: int) -> Sequence[Sequence[str]]:
    """Return the names of the children of each stage."""
    if not _is_chain(module):
        raise ConfigError(
            f"pipeline is {num_stages}, but the model is a {type(module).__name__}, which may call "
            "its parts in any order; give it as an nn.Sequential, each of whose layers takes what "
            "the one before it returns, or set pipeline to 1"
        )
    units = _units(module)
    if len(units) < num_stages:
        raise ConfigError(
            f"pipeline is {num_stages}, but the model has {len(units)} layers with parameters; a "
            f"stage has at least one: set pipeline to {len(units)} at most"
        )
    sizes = [sum(_num_parameters(module.get_submodule(name)) for name in unit) for unit in units]
    bounds = _balanced(sizes, num_stages)
    return [
        [name for unit in units[start:stop] for name in unit] for start, stop in pairwise(bounds)
    ]


def _units(module: nn.Module) -> list[list[str]]:
    """Return names of children, grouped so that each group has parameters, first of all."""
    units: list[list[str]] = []
    leading: list[str] = []
    for name, child in module.named_children():
        if _num_parameters(child):
            units.append([*leading, name])
            leading = []
        elif units:
            units[-1].append(name)
        else:
            leading.append(name)
    return units


def _balanced(sizes: Sequence[int], num_parts: int) -> Sequence[int]:
    """Return where a sequence is cut so that the largest sum is as small as can be.

    Example:
        >>> _balanced([5, 1, 1, 1, 4], 3)
        (0, 1, 3, 5)
    """
    sums = [0, *accumulate(sizes)]
    # By where the sequence ends: the largest sum, and the cuts.
    best: list[tuple[int, tuple[int, ...]]] = [(sums[stop], (0, stop)) for stop in range(len(sums))]
    for part in range(2, num_parts + 1):
        best = [
            min(
                (max(best[start][0], sums[stop] - sums[start]), (*best[start][1], stop))
                for start in range(part - 1, stop)
            )
            if stop >= part
            else best[stop]
            for stop in range(len(sums))
        ]
    return best[-1][1]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
