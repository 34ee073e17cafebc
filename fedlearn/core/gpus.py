"""Assigns a GPU to each process of a machine, as torchrun numbers them."""

from collections.abc import Mapping

import torch

from fedlearn.errors import ConfigError


def read_local_rank(environ: Mapping[str, str]) -> int:
    """Return the index of this process on its machine under torchrun; 0 without torchrun.

    Example:
        >>> read_local_rank({"RANK": "3", "LOCAL_RANK": "1"}), read_local_rank({})
        (1, 0)
    """
    return int(environ.get("LOCAL_RANK", "0"))


def find_own_gpu(environ: Mapping[str, str]) -> torch.device | None:
    """Return the GPU for this process, or ``None`` without any; without torchrun, the first GPU.

    Raises:
        ConfigError: torchrun has started more processes on this machine than it has GPUs.
    """
    if not torch.cuda.is_available():
        return None
    started, found = int(environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if started > found:
        raise ConfigError(
            f"torchrun has started {started} processes on this machine, and each needs a GPU, but "
            f"there {'is 1' if found == 1 else f'are {found}'}; start at most {found}, or compute "
            'on the CPU: set engine.device = "cpu" for a simulation, CUDA_VISIBLE_DEVICES="" in '
            "the environment of other trainings"
        )
    return torch.device("cuda", read_local_rank(environ))
