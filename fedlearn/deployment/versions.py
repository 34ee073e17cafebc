"""Decide whether clients of the previous protocol version may take part in a run."""

from fedlearn.assembly import Deployment


def explain_newest_protocol(components: Deployment) -> str:
    """Say why a run needs clients of the newest protocol; empty if it does not.

    Clients of protocol 2 hash requests for secure aggregation differently, include running
    statistics in the norms of their updates, do not learn whether their last update counted, and
    have no ``drop_last`` or ``max_steps``. They cannot restore a compressed model either.
    """
    local = components.algorithm.local
    if components.secure is not None:
        return "it uses secure aggregation"
    if components.algorithm.transforms:
        return "it transforms updates on the clients"
    if components.algorithm.download is not None:
        return "it compresses the model that clients download"
    if any(spec.is_kept for spec in local.memory.values()):
        return "its clients keep state between rounds"
    if components.algorithm.keep_local:
        return "its clients keep a part of the model for themselves"
    if local.work.drop_last:
        return "client.drop_last is on"
    if local.work.max_steps is not None:
        return "client.max_steps is set"
    return ""
