"""Environment variables that gRPC reads only when it is imported."""

from collections.abc import MutableMapping

_PROXIES = ("https_proxy", "no_proxy")


def prepare_for_grpc(environ: MutableMapping[str, str], *, verbosity: str | None) -> None:
    """Set gRPC's environment variables for a process that connects or serves, unless they are set.

    ``GRPC_ENABLE_FORK_SUPPORT`` is ``false``: with the default of the wheels, gRPC starts a thread
    in forked children, such as the workers of a trainer's data loader, which kills up to a third of
    them with a signal (https://github.com/grpc/grpc/issues/43055). None of our child processes uses
    the gRPC of its parent.

    gRPC reads ``https_proxy`` and ``no_proxy`` only in lower case. Most programs read both, and
    many sites only set the upper-case names, which are therefore copied.

    Args:
        environ: Environment of this process or of one that is about to start.
        verbosity: The level of gRPC's output on standard error, a value of ``GRPC_VERBOSITY``;
            ``None``: gRPC's default.
    """
    environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    for name in _PROXIES:
        if value := environ.get(name.upper()):
            environ.setdefault(name, value)
    if verbosity is not None:
        environ.setdefault("GRPC_VERBOSITY", verbosity)
