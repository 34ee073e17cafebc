"""The configurations that ``fedlearn init`` writes; ``fedlearn demo`` runs the coordinator's."""

from pathlib import Path
from typing import Final

from fedlearn.config import ClientConfig, Config, from_mapping
from fedlearn.config.keys import walk_keys
from fedlearn.config.tables import Use, tables_with
from fedlearn.config.template import render_template
from fedlearn.config.toml import join_key
from fedlearn.core.files import explain_disk_errors
from fedlearn.errors import DeploymentError

_HEADING = """\
A deployment: `fedlearn coordinator` serves it to real clients, and `fedlearn simulate` simulates \
it. The file has all keys that a coordinator uses, with their values. A key that you delete has \
its default. `fedlearn check` prints all values, including those that only simulations use \
(devices, most of engine) and those for runs on Flower (flower). \
The file works unchanged on this machine: the coordinator has the digits' test images, and each \
client brings its own images, 64 pixels each in [0, 1]. Its trainer must build the network of \
[model]: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)). \
With data.source = "none" the coordinator has no data, the clients evaluate, and model.factory \
names the file that the clients train with."""

_CLIENT_HEADING = """\
A client: use it with `fedlearn join FILE --task MODULE:CLASS --config client.toml`. The client \
refuses what this file forbids, no matter what the coordinator asks, and reports each refusal in \
its log and to the coordinator. The file has all keys with their defaults; delete those that you \
do not change."""

#: Keys that only a simulation or a run on Flower uses.
OF_OTHERS: Final = frozenset(
    [
        *tables_with(Use.SIMULATED),
        *(join_key(key.path) for key in walk_keys(Config) if key.has(Use.SIMULATED)),
    ]
)


def make_starter() -> Config:
    """Build a small working deployment: the digits data set and five clients."""
    config = from_mapping(
        {
            "name": "federation",
            "num_rounds": 10,
            "data": {"partition": {"kind": "iid", "num_clients": 5}},
            "client": {"batch_size": 10, "learning_rate": 0.1},
            "cohort": {"num_wanted": 4},
            "stragglers": {"over_selection": 1.25, "deadline_s": 60.0},
        },
        source="the starter",
    )
    # Relative to the file, so that operators' commands find it from anywhere.
    store = config.store.model_copy(update={"runs_dir": "runs"})
    return config.model_copy(update={"store": store})


def write_starter(path: Path, *, of_client: bool = False) -> None:
    """Write a commented ``coordinator.toml``, or ``client.toml``.

    Raises:
        DeploymentError: The file exists already, or cannot be written.
    """
    if path.exists():
        raise DeploymentError(f"{path} exists already; name another file, or move it away")
    if of_client:
        text = render_template(ClientConfig(), omit=(), heading=_CLIENT_HEADING)
    else:
        text = render_template(make_starter(), omit=OF_OTHERS, heading=_HEADING)
    with (
        explain_disk_errors(path, raises=DeploymentError),
        # "x" fails if the file has appeared since the check above.
        path.open("x", encoding="utf-8") as stream,
    ):
        stream.write(text)
