"""Every algorithm on the shelf equals its float64 reference in each way of running it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlearn.algorithms.collector import Collector
from fedlearn.algorithms.local import asks_gradients, find_client_loss
from fedlearn.core.cluster import Cluster
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConfigError
from fedlearn.simulation.choice import ExecutorKind
from fedlearn.simulation.cluster import launch
from tests.parity import shelf, shelf_compression, shelf_drift, shelf_models, shelf_partial
from tests.parity import test_grpc as grpc
from tests.processes import Launcher

CASES: Mapping[str, shelf.Case] = {
    **shelf_drift.CASES,
    **shelf_compression.CASES,
    **shelf_models.CASES,
    **shelf_partial.CASES,
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@every_case
def test_an_algorithm_equals_its_reference_in_one_process(name: str) -> None:
    """Client by client, many at once in two ways, and by sessions in memory."""
    case = CASES[name]
    expected, strategy = shelf.by_reference(case), case.strategy
    kinds = [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP]
    if not asks_gradients(strategy.local) and find_client_loss(strategy.local) is None:
        kinds.append(ExecutorKind.FUSED)
    ways: dict[str, Collector] = {kind.value: shelf.engine(strategy, kind) for kind in kinds}
    ways["memory"] = shelf.over(shelf.sessions(strategy))
    for way, collector in ways.items():
        difference = shelf.largest_difference(shelf.run(strategy, collector), expected)
        assert difference < shelf.TOLERANCE, way


@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.personal])
def test_personal_models_are_those_of_the_reference(name: str, kind: ExecutorKind) -> None:
    """After the last round, of all clients that took part in any."""
    case = CASES[name]
    assert case.personal is not None
    expected = case.personal(shelf.initial().vector.double())
    _, state = shelf.run_to_end(case.strategy, shelf.engine(case.strategy, kind))
    assert state.client_states.keys() == expected.keys()
    for client, model in expected.items():
        found = state.client_states[ClientId(client)]["personal"]
        torch.testing.assert_close(found.double(), model, rtol=0.0, atol=shelf.TOLERANCE)


@every_case
def test_what_is_new_in_an_algorithm_can_be_seen(name: str) -> None:
    """The control: without it, the models differ."""
    control = CASES[name].control
    found = shelf.run(control, shelf.over(shelf.sessions(control)))
    assert shelf.largest_difference(found, shelf.by_reference(CASES[name])) > 1e-4


@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
def test_what_a_sum_cannot_protect_is_refused_with_the_reason(name: str) -> None:
    """Before the first round."""
    case = CASES[name]
    for settings in ({"secure_aggregation": shelf.SECURE}, {"privacy": shelf.PRIVATE}):
        with pytest.raises(ConfigError, match=case.refused):
            shelf.simulate(case.strategy, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.protected])
def test_a_protected_run_gives_the_same_model(name: str) -> None:
    """With bounds that no update reaches, and noise that rounds to nothing."""
    protected = CASES[name].protected
    assert protected is not None
    expected = shelf.simulate(protected)
    secure = shelf.simulate(protected, secure_aggregation=shelf.SECURE)
    torch.testing.assert_close(secure, expected, rtol=0.0, atol=shelf.TOLERANCE)
    private = shelf.simulate(protected, privacy=shelf.PRIVATE)
    # The noise is on a coarser grid than the secure sum.
    torch.testing.assert_close(private, expected, rtol=0.0, atol=10 * shelf.TOLERANCE)


@pytest.mark.slow
def test_clients_over_grpc_equal_the_references(tmp_path: Path) -> None:
    """Real clients, which build the local update from settings, and keep their state on disk."""
    for name, case in CASES.items():
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with grpc.over_grpc(folder, shelf.make_model) as (channel, _):
            found = shelf.run(case.strategy, shelf.over(channel))
        difference = shelf.largest_difference(found, shelf.by_reference(case))
        assert difference < shelf.TOLERANCE, name


@dataclass(frozen=True)
class Runs:
    """Runs every algorithm, on each worker."""

    def __call__(self, cluster: Cluster) -> dict[str, Tensor]:
        found = {}
        for name, case in CASES.items():
            collector = shelf.engine(case.strategy, ExecutorKind.SEQUENTIAL, cluster=cluster)
            found[name] = torch.stack(shelf.run(case.strategy, collector))
        return found


@pytest.mark.slow
def test_two_workers_equal_the_references(launcher: Launcher, tmp_path: Path) -> None:
    """In a process with a time limit."""
    launcher.run(Path(__file__), str(tmp_path / "models")).check_returncode()
    models = load_file(tmp_path / "models")
    assert models.keys() == CASES.keys()
    for name, case in CASES.items():
        difference = shelf.largest_difference(list(models[name]), shelf.by_reference(case))
        assert difference < shelf.TOLERANCE, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    from tests.parity.test_shelf import Runs as Imported  # so that workers can import it

    save_file(launch(Imported(), num_workers=2, environment={}), sys.argv[1])
