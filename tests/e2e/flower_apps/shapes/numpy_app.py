"""Least squares in numpy: the model is a list of arrays."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from shapes.rows import blobs, split_of

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Descend along the gradient of the squared error."""
    weights, bias = msg.content.array_records["arrays"].to_numpy_ndarrays()
    rows = split_of(*blobs(4), context)
    for _ in range(20):
        error = rows.x_train @ weights.T + bias - (2 * rows.y_train[:, None] - 1)
        weights = weights - 0.1 * (error.T @ rows.x_train) / len(error)
        bias = bias - 0.1 * error.mean(axis=0)
    metrics = MetricRecord({"error": float((error**2).mean()), "num-examples": len(error)})
    arrays = ArrayRecord([weights, bias])
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Measure the model that was sent; one of its metrics is a list."""
    weights, bias = msg.content.array_records["arrays"].to_numpy_ndarrays()
    rows = split_of(*blobs(4), context)
    is_right = (rows.x_test @ weights.T + bias > 0)[:, 0] == rows.y_test
    by_class = [float(is_right[rows.y_test == label].mean()) for label in (0, 1)]
    metrics = MetricRecord(
        {
            "accuracy": float(np.mean(is_right)),
            "accuracy_by_class": by_class,
            "num-examples": len(is_right),
        }
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
