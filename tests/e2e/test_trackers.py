"""A private run, deployed and simulated, read back from the files of its trackers."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedlearn.experiment.spending import load_spending
from tests.e2e.deployed import site_in
from tests.processes import Launcher
from tests.tracking import read_tensorboard, read_wandb

NUM_CLIENTS, NUM_ROUNDS = 3, 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, ("tensorboard", "mlflow", "wandb"))), reason="needs all trackers"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's own, and wandb's
]


def read_epsilon(folder: Path, run: str) -> dict[str, tuple[int, float]]:
    """Return the last step and value of ``epsilon`` in the files of each tracker."""
    last = read_tensorboard(folder / "tb" / run).Scalars("epsilon")[-1]
    found = {"tensorboard": (last.step, last.value)}

    client = import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    place = client.get_experiment_by_name("fedlearn").experiment_id
    (logged,) = client.search_runs([place], f"attributes.run_name = '{run}'")
    last = max(client.get_metric_history(logged.info.run_id, "epsilon"), key=lambda it: it.step)
    found["mlflow"] = (last.step, last.value)

    (file,) = (folder / "runs" / run).glob("wandb/offline-run-*/*.wandb")
    rounds = [each.history for each in read_wandb(file) if each.HasField("history")]
    for each in rounds:
        for item in each.item:
            if item.nested_key[0] == "epsilon":
                found["wandb"] = (each.step.num, float(item.value_json))
    return found


def test_every_tracker_has_the_epsilon_of_the_last_round(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = (
        f"num_rounds={NUM_ROUNDS}",
        f"data.partition.num_clients={NUM_CLIENTS}",
        "evaluation.clients=0",
        "algorithm.weight_by_examples=false",
        f'cohort={{sampling="poisson", num_wanted={NUM_CLIENTS}}}',
        "stragglers.over_selection=1.0",
        "privacy.mode=central",
        "privacy.clip_norm=0.5",
        "privacy.noise_multiplier=1.0",
        "privacy.target_delta=1e-3",
        f"privacy.num_users={NUM_CLIENTS}",
        f"trackers.tensorboard='{tmp_path / 'tb'}'",
        f"trackers.mlflow='sqlite:///{tmp_path / 'mlflow.db'}'",
        "trackers.wandb=digits",
    )
    with site_in(launcher, tmp_path, *settings) as site:
        coordinator = site.serving()
        for number in range(NUM_CLIENTS):
            site.join(number)
        assert coordinator.wait() == 0, coordinator.tail()
        site.type("simulate", str(site.file), "--set", "name=simulated")
        for run in ("federation", "simulated"):
            with site.database() as database:
                spent = load_spending(database.run(run))
            assert spent is not None
            found = read_epsilon(tmp_path, run)
            assert found.keys() == {"tensorboard", "mlflow", "wandb"}
            for step, epsilon in found.values():
                assert step == NUM_ROUNDS - 1
                assert epsilon == pytest.approx(spent.epsilon, rel=1e-6)
