"""Environment variables for MKL, torch's matrix library, which reads them once, at first use."""

from collections.abc import MutableMapping


def prepare_for_mkl(environ: MutableMapping[str, str]) -> None:
    """Make MKL reproducible in a process that trains, unless its environment says otherwise.

    Sets ``MKL_CBWR`` to ``AUTO``, MKL's reproducible mode with the fastest code for the processor.
    Without it, the bits of a matrix product may depend on how its operands are aligned to 64
    bytes, and so on earlier allocations: a resumed run could differ from an uninterrupted one.

    Args:
        environ: Environment of this process or of one that is about to start.

    References:
        oneMKL Developer Guide, "Obtaining Numerically Reproducible Results".
    """
    environ.setdefault("MKL_CBWR", "AUTO")
