"""What MKL, torch's library for products, heeds only if it is set before its first product."""

from collections.abc import MutableMapping


def prepare_for_mkl(environ: MutableMapping[str, str]) -> None:
    """Set what is not set yet in the environment of a process that trains.

    ``MKL_CBWR`` is ``AUTO``, MKL's reproducible mode in the fastest code that the processor runs.
    Without it the bits of a product may hang on where its operands begin in a line of 64 bytes,
    so on what was allocated before: a resumed run could differ from one that was not interrupted.

    Args:
        environ: Environment of this process or of one that is about to start.

    References:
        oneMKL Developer Guide, "Obtaining Numerically Reproducible Results".
    """
    environ.setdefault("MKL_CBWR", "AUTO")
