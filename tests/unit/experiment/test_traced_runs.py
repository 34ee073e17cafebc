"""A simulated run has a trace for each round, without what the clients have measured."""

from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fedlearn as fl
from fedlearn.core.tracing import record_spans

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def test_each_simulated_round_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arrays = np.zeros((8, 2)), np.arange(8) % 2
    data = fl.from_arrays(*arrays, partition=fl.Iid(2), test=arrays, seed=0)
    algorithm = fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1))
    exporter = InMemorySpanExporter()
    with record_spans(SimpleSpanProcessor(exporter), role="simulation", environ={}):
        fl.simulate(lambda: nn.Linear(2, 2), data, algorithm, num_rounds=2, name="traced")
    spans = exporter.get_finished_spans()
    assert len({each.context.trace_id for each in spans if each.context is not None}) == 2
    for round_num in range(2):
        about = {"fedlearn.run": "traced", "fedlearn.round_num": round_num}
        own = [each for each in spans if about.items() <= dict(each.attributes or {}).items()]
        names = [each.name for each in own]
        assert {"round", "round.collect", "round.step", "round.evaluate"} <= set(names)
        (root,) = (each for each in own if each.parent is None)
        assert root.name == "round"
    keys = {key for each in spans for key in each.attributes or {}}
    assert keys == {"fedlearn.run", "fedlearn.round_num", "fedlearn.attempt"}
