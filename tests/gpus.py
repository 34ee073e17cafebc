"""What a test needs that runs on GPUs."""


def lack_of_gpus(*, found: int, needed: int) -> str | None:
    """Return why such a test cannot run; ``None``: it can.

    Args:
        found: GPUs that torch sees.
        needed: By the test, >= 1.
    """
    if not found:
        return "no GPU: torch sees no CUDA device"
    return None if found >= needed else f"needs {needed} GPUs, {found} found"
