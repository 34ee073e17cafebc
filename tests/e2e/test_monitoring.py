"""The dashboard and the alerts in server/ against what a real service serves at /metrics."""

from functools import partial
from pathlib import Path
from urllib.request import urlopen

import pytest

from fedlearn.rounds.scheduling import QueueState
from tests.e2e.deployed import SECURE, site_in
from tests.e2e.test_service import NUM_CLIENTS, RUN, Served
from tests.monitors import find_missing, read_samples
from tests.processes import Launcher, until

pytestmark = pytest.mark.slow

EXPERIMENT = f"""
num_rounds = 4
[data]
source = "digits"
[data.partition]
num_clients = {NUM_CLIENTS}
[cohort]
num_wanted = {NUM_CLIENTS}
[stragglers]
over_selection = 1.0
deadline_s = "none"
[evaluation]
clients = {NUM_CLIENTS}
"""
#: Runs that together have all metrics of a run. The secure one is the last: a client that has sent
#: masked updates refuses to send readable ones afterwards.
RUNS = {
    "private": (
        f'cohort={{sampling="poisson", num_wanted={NUM_CLIENTS}}}',
        "algorithm.weight_by_examples=false",
        "privacy.mode=central",
        "privacy.clip_norm=0.5",
        "privacy.noise_multiplier=1.0",
        "privacy.epsilon=100000.0",
        "privacy.target_delta=1e-3",
        f"privacy.num_users={NUM_CLIENTS}",
        "evaluation.clients=0",
    ),
    "asynchronous": (
        "asynchronous.mode=buffered",
        f"asynchronous.concurrency={NUM_CLIENTS}",
        f"asynchronous.buffer_size={NUM_CLIENTS}",
    ),
    "secure": SECURE,
}


def test_each_panel_and_alert_selects_series_of_a_real_service(
    launcher: Launcher, tmp_path: Path
) -> None:
    """It runs a private, an asynchronous and a secure run, one after the other."""
    with site_in(launcher, tmp_path, *RUN) as site, Served(launcher, tmp_path) as served:
        served.write(site.config)
        (tmp_path / "experiment.toml").write_text(EXPERIMENT)
        served.write_service()
        text = served.service_file.read_text()
        served.service_file.write_text(
            text.replace("[service]\n", "[service]\nmax_concurrent_runs = 1\n")
        )
        service = served.serve()
        for number in range(NUM_CLIENTS):
            served.join(number)
        # One more, which is revoked below and therefore refused; any part of the data will do.
        served.join(NUM_CLIENTS, FEDLEARN_DEMO_CLIENT="0")
        served.revoke(NUM_CLIENTS)
        address = served.service.coordinator.http_address
        samples = dict[str, list[dict[str, str]]]()

        def has_ended(name: str) -> bool:
            with urlopen(f"http://{address}/metrics", timeout=60) as page:
                for metric, labels in read_samples(page.read().decode()).items():
                    samples.setdefault(metric, []).extend(labels)
            return served.states()[name] is QueueState.DONE

        for name, overrides in RUNS.items():
            served.submit(name, *overrides)
            until(partial(has_ended, name), told=service.tail)
            assert any(labels["run"] == name for labels in samples["fedlearn_round"])
        # Epsilon is computed now and then, so such a short run may end without any.
        missing = [
            each for each in find_missing(samples) if "'fedlearn_privacy_epsilon'" not in each
        ]
        assert missing == []
        assert {labels["run"] for labels in samples["fedlearn_runs_queued"]} == {"clinics"}
