"""Logistic regression in scikit-learn: the model is the list of coefficients and intercepts."""

import warnings

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from shapes.rows import Split, split_of

CLASSES = [0, 1, 2]
app = ClientApp()


def _given(msg: Message) -> LogisticRegression:
    model = LogisticRegression(max_iter=1, warm_start=True, solver="saga", random_state=0)
    model.classes_ = np.array(CLASSES)
    model.coef_, model.intercept_ = msg.content.array_records["arrays"].to_numpy_ndarrays()
    return model


def _rows(context: Context) -> Split:
    iris = load_iris()
    return split_of(iris.data, iris.target, context)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Take one pass over the rows."""
    model, rows = _given(msg), _rows(context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one pass does not converge
        model.fit(rows.x_train, rows.y_train)
    loss = log_loss(rows.y_train, model.predict_proba(rows.x_train), labels=CLASSES)
    metrics = MetricRecord({"train_logloss": float(loss), "num-examples": len(rows.y_train)})
    arrays = ArrayRecord([model.coef_, model.intercept_])
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Measure the model that was sent."""
    model, rows = _given(msg), _rows(context)
    loss = log_loss(rows.y_test, model.predict_proba(rows.x_test), labels=CLASSES)
    metrics = MetricRecord(
        {
            "test_logloss": float(loss),
            "accuracy": float(model.score(rows.x_test, rows.y_test)),
            "num-examples": len(rows.y_test),
        }
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
