"""Which GPUs a test needs."""


def lack_of_gpus(*, found: int, needed: int) -> str | None:
    """Return why a test cannot run; ``None`` if it can.

    Args:
        found: Number of GPUs that torch sees.
        needed: Number of GPUs that the test needs, >= 1.
    """
    if not found:
        return "no GPU: torch sees no CUDA device"
    return None if found >= needed else f"needs {needed} GPUs, {found} found"
