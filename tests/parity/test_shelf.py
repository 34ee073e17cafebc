"""Every algorithm on the shelf equals its float64 reference in each way of running it."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedlearn.core.cluster import Cluster
from fedlearn.errors import ConfigError
from fedlearn.simulation.choice import ExecutorKind
from fedlearn.simulation.cluster import launch
from tests.parity import (
    shelf,
    shelf_broadcast,
    shelf_clusters,
    shelf_compression,
    shelf_drift,
    shelf_models,
    shelf_partial,
    shelf_trust,
)
from tests.processes import Launcher

CASES: Mapping[str, shelf.Case] = {
    **shelf_drift.CASES,
    **shelf_compression.CASES,
    **shelf_models.CASES,
    **shelf_partial.CASES,
    **shelf_broadcast.CASES,
    **shelf_trust.CASES,
    **shelf_clusters.CASES,
}
every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_an_algorithm_equals_its_reference_in_one_process(name: str) -> None:
    """Client by client, many at once, and by sessions in memory."""
    case = CASES[name]
    together = ExecutorKind.FUSED if shelf.can_fuse(case.strategy, case.make) else ExecutorKind.VMAP
    for kind in (ExecutorKind.SEQUENTIAL, together):
        engine = shelf.engine(case.strategy, kind, make=case.make)
        assert shelf.difference_of_engine(case, engine) < shelf.TOLERANCE, kind
    assert shelf.difference_in_memory(case) < shelf.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if shelf.can_fuse(case.strategy, case.make)]
)
def test_an_algorithm_that_is_fused_equals_its_reference_in_stacks(name: str) -> None:
    """The model may be one that the fused executor cannot train."""
    case = CASES[name]
    engine = shelf.engine(case.strategy, ExecutorKind.VMAP, make=case.make)
    assert shelf.difference_of_engine(case, engine) < shelf.TOLERANCE


@pytest.mark.slow
@every_case
def test_an_algorithm_equals_its_reference_as_auto_chooses(name: str, tmp_path: Path) -> None:
    """By a probe, unless the fused executor takes it."""
    case = CASES[name]
    chosen = shelf.choose_engine(case.strategy, case.make, cache_dir=tmp_path)
    assert shelf.difference_of_engine(case, chosen) < shelf.TOLERANCE


@pytest.mark.slow
@every_case
def test_what_is_new_in_an_algorithm_can_be_seen(name: str) -> None:
    """The control: without it, the models differ."""
    control, make = CASES[name].control, CASES[name].make
    found = shelf.run(control, shelf.over(shelf.sessions(control, make)), make)
    assert shelf.largest_difference(found, CASES[name].models.shared) > 1e-4


@pytest.mark.usefixtures("ready_store")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
def test_what_a_sum_cannot_protect_is_refused_with_the_reason(name: str) -> None:
    """Before the first round."""
    case = CASES[name]
    for settings in ({"secure_aggregation": shelf.SECURE}, {"privacy": shelf.PRIVATE}):
        with pytest.raises(ConfigError, match=case.refused):
            shelf.simulate(case.strategy, make=case.make, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("ready_store")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.protected])
def test_a_protected_run_gives_the_same_model(name: str) -> None:
    """With bounds that no update reaches, and noise that rounds to nothing."""
    protected, make = CASES[name].protected, CASES[name].make
    assert protected is not None
    expected = shelf.simulate(protected, make=make)
    secure = shelf.simulate(protected, make=make, secure_aggregation=shelf.SECURE)
    torch.testing.assert_close(secure, expected, rtol=0.0, atol=shelf.TOLERANCE)
    private = shelf.simulate(protected, make=make, privacy=shelf.PRIVATE)
    # The noise is on a coarser grid than the secure sum, and BatchNorm magnifies small differences.
    torch.testing.assert_close(private, expected, rtol=0.0, atol=20 * shelf.TOLERANCE)


@pytest.mark.slow
def test_clients_over_grpc_equal_the_references(tmp_path: Path) -> None:
    """Real clients build the local update from settings."""
    for number, (name, case) in enumerate(CASES.items()):
        difference = shelf.difference_over_grpc(case, tmp_path / str(number))
        assert difference < shelf.TOLERANCE, name


@dataclass(frozen=True)
class Runs:
    """Runs every algorithm, on each worker."""

    def __call__(self, cluster: Cluster) -> dict[str, shelf.Models]:
        found = {}
        for name, case in CASES.items():
            collector = shelf.engine(
                case.strategy, ExecutorKind.SEQUENTIAL, cluster=cluster, make=case.make
            )
            found[name] = shelf.run_to_models(case, collector)
        return found


def differences_of_two_workers() -> dict[str, float]:
    """The worst difference of each case; from a process that may start others."""
    from tests.parity.test_shelf import Runs as Imported  # noqa: PLC0415 - so that workers find it

    found = launch(Imported(), num_workers=2, environment={})
    return {name: shelf.worst_difference(found[name], case.models) for name, case in CASES.items()}


@pytest.mark.slow
def test_two_workers_equal_the_references(launcher: Launcher, tmp_path: Path) -> None:
    """In a process with a time limit."""
    launcher.run(Path(__file__), str(tmp_path / "differences")).check_returncode()
    differences = json.loads((tmp_path / "differences").read_bytes())
    assert differences.keys() == CASES.keys()
    for name, difference in differences.items():
        assert difference < shelf.TOLERANCE, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(differences_of_two_workers()))
