"""Release a run's model into the registry, and load a release by its tag."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlearn.config import ServingConfig, resolve_addresses
from fedlearn.core.clock import utc_now
from fedlearn.core.files import explain_disk_errors
from fedlearn.core.json_values import to_json_values
from fedlearn.core.participations import Status
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.model_card import CARD_FILE, render_card
from fedlearn.experiment.run import Run
from fedlearn.experiment.site import folder_of, folder_of_run, keys_folder_of, open_database
from fedlearn.experiment.spending import load_spending
from fedlearn.experiment.summary import summarize
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit_checkpoints import find_signer, require_current
from fedlearn.store.releases import WEIGHTS_FILE, ReleaseStore, StoredRelease
from fedlearn.store.runs import Database, StoredRun

if TYPE_CHECKING:  # importing torch takes a second, and listing releases needs none of it
    from torch import Tensor


@dataclass(frozen=True)
class ReleasedModel:
    """A released model, whose signature and digest were checked.

    Attributes:
        stored: Its record in the registry.
        content: The safetensors file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> import fedlearn as fl
        >>> data = fl.from_arrays(
        ...     torch.eye(10), torch.arange(10) % 2, partition=fl.Iid(num_clients=3),
        ...     test_fraction=0.2, seed=0,
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     run = fl.simulate(
        ...         lambda: torch.nn.Linear(10, 2), data, fl.FedSGD(learning_rate=0.1),
        ...         num_rounds=1, cohort={"num_wanted": 3}, store={"runs_dir": f"{folder}/runs"},
        ...     )
        ...     tagged = ReleaseStore(run.stored.database).tag(
        ...         release_model(run.stored, best=True).id, "champion"
        ...     )
        ...     fl.load_release("champion", runs_dir=f"{folder}/runs").weights()["weight"].shape
        run ...
        torch.Size([2, 10])
    """

    stored: StoredRelease
    content: bytes

    @property
    def id(self) -> str:
        """Its id in the registry."""
        return self.stored.signed.id

    @property
    def facts(self) -> Mapping[str, Any]:  # Any: JSON
        """The signed statement: run, rounds, metrics, privacy, configuration and versions."""
        return self.stored.signed.facts

    @property
    def card(self) -> str:
        """The model card, Markdown."""
        return render_card(self.stored.signed)

    def weights(self) -> "dict[str, Tensor]":
        """Return the tensors by name, as for ``Module.load_state_dict``."""
        from safetensors.torch import load  # noqa: PLC0415 (it takes torch)

        return load(self.content)


def release_model(stored: StoredRun, *, best: bool) -> ReleasedModel:
    """Record a run's model in the registry: its weights, a signed statement and a model card.

    The same model of a run is recorded once; another call returns that release.

    Args:
        stored: The run.
        best: The best model, if one was measured; else the last.

    Raises:
        DeploymentError: The signing key is damaged, cannot be written, or was replaced.
        StoreError: The run has no model, or the registry cannot be written.
    """
    from safetensors.torch import save  # noqa: PLC0415 (it takes torch)

    num_rounds, weights = stored.load_weights(best=best)
    content = save(weights)
    facts = describe_release(stored, num_rounds=num_rounds, content=content)
    key = SigningKey(keys_folder_of(folder_of_run(stored)))
    with stored.database.reading() as session:
        require_current(session, key)
    signed = SignedRelease.sign(facts, key)
    files = {WEIGHTS_FILE: content, CARD_FILE: render_card(signed).encode()}
    return ReleasedModel(
        ReleaseStore(stored.database).add(signed, files, study=stored.record.study), content
    )


def export_run(run: Run, *, best: bool) -> tuple[bytes, StoredRelease | None]:
    """Return a run's weights, or the result of a query, as a safetensors file, once recorded.

    Returns:
        The file, and the release in the registry; ``None`` for a query, which has no model.

    Raises:
        DeploymentError: As :func:`release_model`.
        StoreError: As :func:`release_model`.
    """
    from safetensors.torch import save  # noqa: PLC0415 (it takes torch)

    # Recorded first: nothing leaves without a record.
    if run.record.has_model:
        release = release_model(run.stored, best=best)
        return release.content, release.stored
    content = save(run.state())
    run.stored.record_export()
    return content, None


def describe_release(stored: StoredRun, *, num_rounds: int, content: bytes) -> dict[str, object]:
    """Return the facts about a run's model after ``num_rounds`` rounds, as JSON values.

    Privacy is what the ledger has spent by now, which is at least what the model has cost.
    """
    record, spent = stored.record, load_spending(stored)
    rounds = [each for each in stored.rounds() if each.round_num < num_rounds]
    summary = summarize(record, rounds)
    reported = {
        each.client_id
        for one in rounds
        for each in one.participations
        if each.status is Status.REPORTED
    }
    return to_json_values(
        {
            "run": record.name,
            "run_created_utc": record.created_utc,
            "is_deployed": record.is_deployed,
            "num_rounds": num_rounds,
            "planned_rounds": record.num_rounds,
            "released_utc": utc_now(),
            "sha256": sha256(content).hexdigest(),
            "num_bytes": len(content),
            "metrics": summary.metrics,
            "num_clients_asked": summary.num_clients,
            "num_clients_reported": len(reported),
            "privacy": None
            if spent is None
            else {
                "epsilon": spent.epsilon,
                "epsilon_with_cohorts": spent.epsilon_with_cohorts,
                "delta": spent.target_delta,
                "hidden": spent.hidden,
            },
            "config": record.config,
            "config_hash": record.config_hash,
            "versions": record.versions,
        }
    )


def load_release(
    reference: str, *, runs_dir: Path | str | None = None, public_key: str | None = None
) -> ReleasedModel:
    """Load a released model by its tag or id, and check its signature and its file.

    The read is recorded in the audit log.

    Args:
        reference: A tag such as ``champion``, or the beginning of an id.
        runs_dir: Directory of the runs; by default ``FEDLEARN_RUNS_DIR`` or ``runs``. The store is
            the one there, or that of ``FEDLEARN_STORE_URL``.
        public_key: Hexadecimal key that must have signed the release; by default the one in the
            coordinator's folder next to ``runs_dir``.

    Raises:
        ConfigError: No key is given, and there is none next to ``runs_dir``.
        StoreError: There is no such release, or it was changed.

    Example:
        >>> load_release("champion", runs_dir="no-such-folder")
        Traceback (most recent call last):
        fedlearn.errors.ConfigError: no-such-folder: there is no such directory of runs
    """
    given = None if runs_dir is None else Path(runs_dir)
    addresses = resolve_addresses(ServingConfig(), environ=os.environ, runs_dir=given)
    if addresses.store_url is None and not addresses.runs_dir.is_dir():
        raise ConfigError(f"{addresses.runs_dir}: there is no such directory of runs")
    if public_key is None:
        key = find_public_key(keys_folder_of(folder_of(None, runs_dir=addresses.runs_dir)))
    else:
        key = public_key
    with open_database(addresses) as database:
        found = ReleaseStore(database).read(reference)
        return verify_release(found, database, public_key=key)


def find_public_key(keys_folder: Path) -> str:
    """Return the public half, hexadecimal, of the signing key in ``keys_folder``.

    Raises:
        ConfigError: There is none.
        DeploymentError: It is damaged.
    """
    key = SigningKey.find(keys_folder)
    if key is None:
        raise ConfigError(
            f"{keys_folder} has no signing.key, which says whose signature is right; name the key "
            "with public_key= or --public-key"
        )
    return key.public_key.hex()


def verify_release(stored: StoredRelease, database: Database, *, public_key: str) -> ReleasedModel:
    """Read a release's file and check it, its statement and the signature.

    A key that ``public_key`` has replaced, or that has replaced it, may have signed while it was
    the signing key, as the audit log proves.

    Raises:
        StoreError: Something is wrong with it; the message says what.
    """
    path = stored.path / WEIGHTS_FILE
    with explain_disk_errors(path, raises=StoreError, doing="read"):
        content = path.read_bytes()
    with database.reading() as session:
        signer = find_signer(session, stored.signed, trusted=public_key)
    problem = stored.signed.find_problem(public_key=signer)
    if problem is None:
        problem = _find_difference(stored, content)
    if problem is not None:
        raise StoreError(
            f"release {stored.short_id} of {stored.run}: {problem}; do not use it, and restore it "
            "from a backup or export the run again"
        )
    return ReleasedModel(stored, content)


def _find_difference(stored: StoredRelease, content: bytes) -> str | None:
    """Return what differs from the signed statement: the row that lists show, or the file."""
    facts = stored.signed.facts
    columns = ("run", "run_created_utc", "num_rounds", "sha256", "num_bytes")
    if any(facts.get(name) != getattr(stored, name) for name in columns):
        return "its row differs from its signed statement"
    if sha256(content).hexdigest() != facts["sha256"]:
        return f"{stored.path / WEIGHTS_FILE} is another file than the one that was signed"
    return None
