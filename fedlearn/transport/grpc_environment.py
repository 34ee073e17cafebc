"""What gRPC heeds only if it stands in the environment before gRPC is imported."""

from collections.abc import MutableMapping

_PROXIES = ("https_proxy", "no_proxy")


def prepare_for_grpc(environ: MutableMapping[str, str], *, verbosity: str | None) -> None:
    """Set what is not set yet in the environment of a process that connects or serves.

    ``GRPC_ENABLE_FORK_SUPPORT`` is ``false``: with the wheels' default, gRPC starts a thread in
    forked children, such as the workers of a trainer's data loader, that ends up to a third of
    them with a signal (https://github.com/grpc/grpc/issues/43055). No child of ours uses the gRPC
    of its parent.

    gRPC reads ``https_proxy`` and ``no_proxy`` in small letters alone; most programs read both, and
    many sites set the capitals alone.

    Args:
        environ: Environment of this process or of one that is about to start.
        verbosity: What gRPC writes to standard error, a value of ``GRPC_VERBOSITY``; ``None``:
            what it writes by itself.
    """
    environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    for name in _PROXIES:
        if value := environ.get(name.upper()):
            environ.setdefault(name, value)
    if verbosity is not None:
        environ.setdefault("GRPC_VERBOSITY", verbosity)
