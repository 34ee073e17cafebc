"""Runs in a notebook, executed by a real Jupyter kernel."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

SETUP = """
    import asyncio
    import os
    import signal

    import torch

    import fedlearn as fl

    asyncio.get_running_loop()  # a notebook has one
    data = fl.from_arrays(
        torch.eye(10), torch.arange(10) % 2, partition=fl.Iid(num_clients=3),
        test_fraction=0.2, seed=0,
    )

    def simulate(*callbacks, **settings):
        return fl.simulate(
            lambda: torch.nn.Linear(10, 2), data, fl.FedSGD(learning_rate=0.1), num_rounds=30,
            store={"runs_dir": "runs", "checkpoint_every_s": 0.0}, callbacks=callbacks, **settings,
        )

    class Interrupt:
        def after_round(self, record, model):
            if record.round_num == 20:
                os.kill(os.getpid(), signal.SIGINT)  # as the stop button does
"""
CELLS = (
    SETUP,
    "simulate(name='shown')",
    "simulate(name='quiet', progress=False).record.status.value",
    "simulate(Interrupt(), name='cut')",
    "len(simulate(resume='cut', progress=False).history)",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the client that talks to the kernel
def test_a_run_is_shown_interrupted_and_resumed_in_a_notebook(tmp_path: Path) -> None:
    """One output for the progress, which is replaced; another for the run, with two curves."""
    cells = [nbformat.v4.new_code_cell(dedent(each)) for each in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    setup, shown, quiet, cut, resumed = (each.outputs for each in notebook.cells)
    assert setup == []

    progress, run = (each.data for each in shown)
    assert progress["text/plain"].startswith("run: shown done after 30/30 rounds")
    rounds = re.findall(r"<tr><td>(\d+)</td>", progress["text/html"])
    assert rounds == [str(number) for number in range(21, 31)]
    assert "<progress" not in progress["text/html"], "the result has taken its place"
    assert run["text/html"].count("<svg ") == 2
    assert "shown done after 30/30 rounds" in run["text/html"]

    assert [each.data["text/plain"] for each in quiet] == ["'done'"]

    progress, error = cut
    assert "cut interrupted after 20/30 rounds" in progress.data["text/plain"]
    assert "next: fl.simulate(..., resume='cut')" in progress.data["text/plain"]
    assert error.ename == "KeyboardInterrupt"
    assert [each.data["text/plain"] for each in resumed] == ["30"]
