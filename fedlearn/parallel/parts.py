"""Divide a model into blocks, into pipeline stages, and into columns and rows of its matrices."""

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

#: Elementwise layers: only these may lie between the two matrices of a cut pair.
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
    """How the matrix of a linear layer is divided among the processes of a tensor group.

    Attributes:
        along: "columns": each process has some of the outputs; "rows": each has some of the
            inputs, and the products are summed. Only elementwise layers may lie between a layer
            of columns and the layer of rows that follows it.
        unit: Number of neighboring outputs, or inputs, that must stay together, such as those of
            an attention head, >= 1.

    References:
        Shoeybi et al., 2019, `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, section 3.
    """

    along: Literal["columns", "rows"]
    unit: Count = 1


@runtime_checkable
class CutsTensors(Protocol):
    """A module that declares how its matrices are cut for tensor parallelism."""

    def tensor_cuts(self) -> Mapping[str, Cut]:
        """Return the cut of each linear layer that is cut, by the layer's name in the module."""


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name: the modules to shard or recompute as a whole.

    The layers of a stack are blocks, wherever the stack is. A stack is an ``nn.ModuleList``,
    ``nn.ModuleDict`` or ``nn.Sequential`` that holds at least two modules which themselves have
    submodules, such as the layers of an encoder. Any other module with parameters is a block if it
    contains no stack. In a module that only wraps another one, the blocks are those of the inner
    module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ModuleList([nn.Linear(2, 2)]))
        >>> list(find_blocks(model))
        ['0', '2.0']
        >>> layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> list(find_blocks(nn.Sequential(nn.Linear(3, 4), encoder)))
        ['0', '1.layers.0', '1.layers.1']
    """
    return dict(_iter_blocks(module, ""))


def _iter_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = {name: each for name, each in module.named_children() if _num_parameters(each)}
    # Attention uses the weights of its linear layer without calling the layer, so the hooks with
    # which FSDP gathers parameters would not run.
    if isinstance(module, nn.MultiheadAttention):
        return
    for name, child in children.items():
        if _holds_blocks(child, in_stack=_is_stack(module), is_only=len(children) == 1):
            yield from _iter_blocks(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _holds_blocks(module: nn.Module, *, in_stack: bool, is_only: bool) -> bool:
    """Tell whether blocks must be looked for inside a module, which then is no block itself."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # never called, so it cannot be a block
        return True
    if in_stack and not _is_chain(module):
        return False
    is_wrapper = is_only and _is_composite(module) and not in_stack and not _is_of_torch(module)
    return is_wrapper or any(_is_stack(each) for each in module.modules())


def _is_stack(module: nn.Module) -> bool:
    """Tell whether a module is a plain container of layers, two of which have submodules."""
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict) or _is_chain(module)
    return is_container and sum(_is_composite(each) for each in module.children()) > 1


def _is_composite(module: nn.Module) -> bool:
    return _num_parameters(module) > 0 and any(True for _ in module.children())


def _is_of_torch(module: nn.Module) -> bool:
    """Tell whether a module is torch's own, which may use its submodules without calling them."""
    return type(module).__module__.startswith("torch.nn.") and not _is_chain(module)


def find_blocks_to_shard(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks to shard, by name; the parameters of each are gathered together.

    A block that shares a parameter with another part of the model is left out, so that it is
    gathered with the model itself. If the parameter were gathered with one block, it would be
    missing in the other.
    """
    blocks = find_blocks(module)
    owners = defaultdict[nn.Parameter, set[str]](set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners[parameter].add(_find_block(name, blocks))
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    return {name: block for name, block in blocks.items() if name not in shared}


def _find_block(parameter: str, blocks: Iterable[str]) -> str:
    """Return the name of the block that contains a parameter; empty if no block does."""
    return next((name for name in blocks if parameter.startswith(f"{name}.")), "")


def recompute(module: nn.Module) -> None:
    """Make each block save only its input, and recompute the rest in the backward pass.

    References:
        Chen et al., 2016, `Training Deep Nets with Sublinear Memory Cost
        <https://arxiv.org/abs/1604.06174>`_.
    """
    for block in find_blocks(module).values():
        # Replace the method instead of wrapping the module, so that parameters keep their names.
        # The reentrant variant would lose the gradients if no input requires one.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def stage_of(module: nn.Module, index: int, num_stages: int) -> nn.Module:
    """Return one pipeline stage of a model; its parameters keep their names.

    The stages are chosen so that the largest has as few parameters as possible.

    Args:
        module: The model, an ``nn.Sequential``. The stage shares its layers and copies none.
        index: Index of the stage, from 0.
        num_stages: Number of stages, >= 1.

    Raises:
        ConfigError: The model is not an ``nn.Sequential``, or has fewer layers with parameters than
            there are stages.

    Example:
        >>> chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
        >>> [[name for name, _ in stage_of(chain, at, 2).named_children()] for at in range(2)]
        [['0', '1'], ['2', '3']]
    """
    names = _divide_stages(module, num_stages)[index]
    own_children = OrderedDict(
        (name, child) for name, child in module.named_children() if name in names
    )
    return nn.Sequential(own_children).train(module.training)


def require_whole(module: nn.Module, mesh: Mesh) -> None:
    """Check that a mesh splits no shared parameter, and leaves each stage something to train.

    Args:
        module: The whole model, which fits the mesh otherwise.
        mesh: The mesh.

    Raises:
        ConfigError: All parameters of a stage are frozen; a parameter to shard has no dimension; or
            a parameter that layers share would be split, because they are in different stages or
            are cut.
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
                "and each stage must train something; lower pipeline"
            )
        cuts = find_cuts(part, mesh.tensor) if mesh.tensor > 1 else {}
        for name, each in named.items():
            if mesh.is_sharded and not each.dim():
                raise ConfigError(
                    f"parameter {name!r} is a scalar without dimensions, which cannot be sharded; "
                    "give it the shape [1], or set shard to 1"
                )
            is_cut = name.rpartition(".")[0] in cuts
            owner_of[name] = (place, name if is_cut else "")
    for names in _find_tied_names(module):
        if len({owner_of[name] for name in names}) > 1:
            raise ConfigError(
                f"{names[0]!r} and {names[1]!r} are one parameter, but on the mesh {mesh} they "
                "would be two; set pipeline and tensor to 1, put the layers that share it into "
                "one module of a stage, or use two parameters"
            )


def _find_tied_names(module: nn.Module) -> list[list[str]]:
    """Return all names of each parameter that has more than one."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, each in module.named_parameters(remove_duplicate=False):
        names[id(each)].append(name)
    return [found for found in names.values() if len(found) > 1]


def find_cuts(module: nn.Module, degree: int) -> dict[str, Cut]:
    """Return the cut of each linear layer over ``degree`` processes, by the layer's name.

    A module may declare its cuts (:class:`CutsTensors`). Otherwise, two linear layers of an
    ``nn.Sequential`` with only elementwise layers between them become a pair of columns and rows.

    Raises:
        ConfigError: There is no layer to cut, a module names a layer that is not linear, or the
            width of a layer cannot be divided by the degree.

    Example:
        >>> chain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        >>> {name: cut.along for name, cut in find_cuts(chain, 2).items()}
        {'0': 'columns', '2': 'rows'}
    """
    cuts = dict(_iter_cuts(module, ""))
    if not cuts:
        raise ConfigError(
            f"tensor is {degree}, but the model has neither two linear layers with only "
            "elementwise layers between them, nor a method tensor_cuts that names others; add "
            "one, or set tensor to 1"
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
                f"tensor is {degree}, but layer {name!r} has {width} {cut.along}{whole}, which it "
                f"does not divide; use a degree that divides {width // cut.unit}"
            )
    return cuts


def _iter_cuts(module: nn.Module, prefix: str) -> Iterator[tuple[str, Cut]]:
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
            # Pairs do not overlap: the layer after a pair may begin the next one.
            before = name if before is None else None
        elif not isinstance(child, _ELEMENTWISE):
            before = None
            yield from _iter_cuts(child, f"{prefix}{name}.")


def _is_chain(module: nn.Module) -> bool:
    """Tell whether a module passes the output of each child to the next."""
    return type(module).forward is nn.Sequential.forward


def _divide_stages(module: nn.Module, num_stages: int) -> Sequence[Sequence[str]]:
    if not _is_chain(module):
        raise ConfigError(
            f"pipeline is {num_stages}, but the model is a {type(module).__name__}, which may "
            "call its parts in any order; make it an nn.Sequential in which each layer takes the "
            "output of the one before it, or set pipeline to 1"
        )
    units = _group_children(module)
    if len(units) < num_stages:
        raise ConfigError(
            f"pipeline is {num_stages}, but the model has {len(units)} layers with parameters; a "
            f"stage needs at least one: set pipeline to at most {len(units)}"
        )
    sizes = [sum(_num_parameters(module.get_submodule(name)) for name in unit) for unit in units]
    bounds = _balance(sizes, num_stages)
    return [
        [name for unit in units[start:stop] for name in unit] for start, stop in pairwise(bounds)
    ]


def _group_children(module: nn.Module) -> list[list[str]]:
    """Group the names of children: each group has one child with parameters.

    Children without parameters join the group before them, or the first group.
    """
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


def _balance(sizes: Sequence[int], num_parts: int) -> Sequence[int]:
    """Return the bounds of consecutive parts whose largest sum is as small as possible.

    Example:
        >>> _balance([5, 1, 1, 1, 4], 3)
        (0, 1, 3, 5)
    """
    sums = [0, *accumulate(sizes)]
    # Dynamic programming. Entry n is the best division of the first n sizes: its largest sum, and
    # its bounds.
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
