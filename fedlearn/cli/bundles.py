"""The commands for bundles: make and read them, and approve what runs on a client's data.

As in :mod:`fedlearn.cli.app`, each command imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from fedlearn.cli.options import Json, Output, examples
from fedlearn.errors import ConfigError

if TYPE_CHECKING:
    from fedlearn.client.bundle_store import Approval
    from fedlearn.identity.bundles import Bundle

app = typer.Typer()
bundle_app = typer.Typer(help="Make, show and compare bundles: trainers that a run ships.")
app.add_typer(bundle_app, name="bundle")

BundleArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE|DIGEST", help="A file, or the beginning of a digest that --client stores."
    ),
]
ClientFolder: TypeAlias = Annotated[
    str, typer.Argument(metavar="FOLDER|NAME", help="The client's folder, or its name.")
]
DigestArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="DIGEST", help="At least 4 characters of a bundle's digest.")
]
ClientConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The client's configuration, for its rules."),
]
OfClient: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--client", metavar="FOLDER|NAME", help="Look up digests among this client's bundles."
    ),
]


@bundle_app.command(epilog="Example: fedlearn bundle key researcher.key")
def key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The private key to write.")],
) -> None:
    """Write a researcher's private key, and print its public key."""
    from fedlearn.identity.signing import ResearcherKey

    public_key = ResearcherKey.create(file).public_key.hex()
    typer.echo(f"{file}: keep it secret; the owners of the data need its public key:")
    typer.echo(public_key)


@bundle_app.command(epilog=examples("bundle make trainer --sign researcher.key"))
def make(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The trainer's files, with a bundle.toml.")
    ],
    *,
    sign: Annotated[
        Path,
        typer.Option(
            metavar="KEY", help="The researcher's private key; `fedlearn bundle key` writes one."
        ),
    ],
    output: Output = None,
) -> None:
    """Pack a trainer's folder into one signed file, and print its digest.

    The same folder and key always give the same file.
    """
    from fedlearn.core.files import write_durably
    from fedlearn.errors import DeploymentError
    from fedlearn.identity.bundle_folder import make_bundle
    from fedlearn.identity.signing import ResearcherKey

    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    made = make_bundle(folder, ResearcherKey.load(sign))
    path = output or Path(f"{made.manifest.name}.bundle")
    write_durably(path, made.content, raises=DeploymentError)
    typer.echo(f"{path}: {made.manifest.name} {made.manifest.version}, {len(made.content)} bytes")
    typer.echo(made.digest)


@bundle_app.command(
    epilog=examples("bundle show trainer.bundle", "bundle show 3f2a90 --client clinic-a --code")
)
def show(
    bundle: BundleArgument,
    *,
    client: OfClient = None,
    code: Annotated[
        bool, typer.Option("--code", help="Also show the content of every file.")
    ] = False,
    requirements: Annotated[
        bool,
        typer.Option(
            "--requirements", help="Show only the requirements, for `pip install -r` to read."
        ),
    ] = False,
) -> None:
    """Check a bundle, and show its signer, its requirements and its files."""
    from fedlearn.identity.bundle_text import describe_bundle, list_requirements, show_files

    found = _find(bundle, client)
    if requirements:
        _print(list_requirements(found))
        return
    _print(describe_bundle(found))
    if code:
        _print(show_files(found))


@bundle_app.command(
    epilog=examples("bundle diff old.bundle new.bundle", "bundle diff 3f2a 77b0 --client clinic-a")
)
def diff(old: BundleArgument, new: BundleArgument, *, client: OfClient = None) -> None:
    """Show what changed from one bundle to another: parameters, requirements and code."""
    from fedlearn.identity.bundle_text import diff_bundles

    lines = list(diff_bundles(_find(old, client), _find(new, client)))
    _print(lines or ["the two bundles are the same"])


@app.command(epilog=examples("bundles clinic-a", "bundles clinic-a --config client.toml"))
def bundles(
    client: ClientFolder, *, as_json: Json = False, config: ClientConfigFile = None
) -> None:
    """List the bundles that a client was sent, and whether they may run on its data."""
    from fedlearn.config import load_client
    from fedlearn.core.words import replace_unprintable
    from fedlearn.deployment.approving import list_bundles, try_isolation
    from fedlearn.deployment.known_keys import find_client_home
    from fedlearn.experiment.layout import table_text

    home, policy = find_client_home(client, environ=os.environ), load_client(config).to_policy()
    found = list(list_bundles(home.folder, policy.bundles))
    if as_json:
        for digest, bundle, decision in found:
            about = {} if bundle is None else bundle.manifest.values()
            known = {each: about.get(each) for each in ("name", "version", "signer")}
            typer.echo(json.dumps({"digest": digest, **known, **asdict(decision)}))
    elif found:
        header = ("digest", "bundle", "signed by", "state", "by", "reason")
        rows = [
            (
                digest[:12],
                "" if bundle is None else f"{bundle.manifest.name} {bundle.manifest.version}",
                "" if bundle is None else bundle.manifest.signer[:12],
                decision.approval.value,
                decision.by,
                replace_unprintable(decision.reason),
            )
            for digest, bundle, decision in found
        ]
        typer.echo(table_text([header, *rows]))
    else:
        typer.echo("no bundles yet; a run that ships one sends it when this client connects")
    if not as_json:
        missing = try_isolation(home.folder, policy.bundles)
        typer.echo(
            "this machine isolates bundles from network, keys and files"
            if missing is None
            else f"this machine does not isolate bundles: {missing}"
        )


@app.command(epilog=examples("approve clinic-a 3f2a90"))
def approve(client: ClientFolder, digest: DigestArgument) -> None:
    """Let a bundle run on a client's data; read it first: `fedlearn bundle show --code`."""
    from fedlearn.client.bundle_store import Approval

    _decide(client, digest, Approval.APPROVED, reason="")


@app.command(epilog=examples('refuse clinic-a 3f2a90 --reason "it reads the names"'))
def refuse(
    client: ClientFolder,
    digest: DigestArgument,
    *,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Why; the coordinator's operator reads it.")
    ] = "",
) -> None:
    """Never run a bundle on a client's data, even if it was approved before."""
    from fedlearn.client.bundle_store import Approval

    _decide(client, digest, Approval.REFUSED, reason=reason)


def _decide(client: str, digest: str, approval: "Approval", *, reason: str) -> None:
    from fedlearn.core.clock import SystemClock
    from fedlearn.deployment.approving import decide
    from fedlearn.deployment.known_keys import find_client_home

    home = find_client_home(client, environ=os.environ)
    decided = decide(home.folder, digest, approval, reason=reason, clock=SystemClock())
    about = decided.manifest
    typer.echo(f"{about.name} {about.version} ({decided.digest[:12]}) is {approval}")


def _find(bundle: str, client: str | None) -> "Bundle":
    """Load a bundle from a file, or by its digest from a client's folder."""
    from fedlearn.identity.bundles import Bundle

    if client is None:
        if not Path(bundle).is_file():
            raise ConfigError(
                f"{bundle}: there is no such file; to name a bundle by its digest, name the client "
                "that stores it: --client NAME"
            )
        return Bundle.load(Path(bundle))
    from fedlearn.client.bundle_store import BundleStore
    from fedlearn.deployment.known_keys import find_client_home

    store = BundleStore(find_client_home(client, environ=os.environ).folder / "bundles")
    return store.load(store.find(bundle))


def _print(lines: Iterator[str] | list[str]) -> None:
    for line in lines:
        typer.echo(line)
