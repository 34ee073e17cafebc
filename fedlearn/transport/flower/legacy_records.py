"""The records of Flower's earlier API: ``client_fn``, ``NumPyClient``, ``flwr.server.strategy``.

Their names begin with the type of the message (``fitins.parameters``), and arrays have numbers
instead of names. Otherwise they contain the same as those of :mod:`.stock_records`.
"""

from dataclasses import dataclass

from flwr.app import MetricRecord, RecordDict

from fedlearn.core.messages import EvaluateRequest, Reply, Request
from fedlearn.errors import ProtocolError
from fedlearn.transport.flower.stock_records import ARRAYS, CONFIG, METRICS, StockRecords
from fedlearn.transport.flower.stock_records import NUM_EXAMPLES as WEIGHT

#: The status code of success.
_OK = 0


@dataclass(frozen=True, kw_only=True)
class LegacyRecords(StockRecords):
    """Converts messages to and from records for ClientApps of Flower's earlier API."""

    def content(self, request: Request) -> RecordDict:
        """Convert a request to records; raises the same errors as for the present API."""
        present = super().content(request)
        prefix = "evaluateins" if isinstance(request, EvaluateRequest) else "fitins"
        return RecordDict(
            {
                f"{prefix}.parameters": present.array_records[ARRAYS],
                f"{prefix}.config": present.config_records[CONFIG],
            }
        )

    def reply(self, content: RecordDict, request: Request) -> Reply:
        """Convert a client's records to a reply.

        Raises:
            ProtocolError: They are not a reply, or say that the client failed.
        """
        evaluates = isinstance(request, EvaluateRequest)
        prefix = "evaluateres" if evaluates else "fitres"
        try:
            status = content.config_records[f"{prefix}.status"]
            metrics = content.config_records[f"{prefix}.metrics"]
            count = content.metric_records[f"{prefix}.num_examples"]["num_examples"]
            losses = content.metric_records[f"{prefix}.loss"] if evaluates else MetricRecord()
            arrays = None if evaluates else content.array_records[f"{prefix}.parameters"]
        except KeyError as error:
            raise ProtocolError(
                f"the reply lacks the record {error}, which client_fn and NumPyClient send; if "
                'this app registers functions with @app.train(), set flower.client_apps to "flower"'
            ) from error
        if status.get("code") != _OK:
            raise ProtocolError(f"the client could not answer: {status.get('message')!r}")
        numbers = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        present = RecordDict({METRICS: MetricRecord({**numbers, **losses, WEIGHT: count})})
        if arrays is not None:
            present[ARRAYS] = arrays
        return super().reply(present, request)
