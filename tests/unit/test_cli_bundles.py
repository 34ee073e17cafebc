"""`fedlearn bundle`, `bundles`, `approve` and `refuse`: output and exit codes."""

import json
from pathlib import Path

import pytest

from fedlearn.cli.app import main
from fedlearn.client.bundle_store import BundleStore
from tests.bundles import SIGNER, build, write_folder

pytestmark = pytest.mark.usefixtures("surroundings")


def run(capsys: pytest.CaptureFixture[str], *command: str, code: int = 0) -> str:
    """Run a command; return its output, or its error message if ``code`` is 2."""
    assert main(list(command)) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


def test_a_researcher_makes_a_bundle_and_an_owner_reads_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Show and diff print what is in it, and no escape sequence takes effect."""
    write_folder(Path("trainer"), code='"""\x1b[2Jhidden"""\nclass Trainer: ...\n')
    assert "bundle key" in run(capsys, "bundle", "make", "trainer", "--sign", "my.key", code=2)
    public_key = run(capsys, "bundle", "key", "my.key").splitlines()[-1]
    assert "exists already" in run(capsys, "bundle", "key", "my.key", code=2)
    digest = run(capsys, "bundle", "make", "trainer", "--sign", "my.key").splitlines()[-1]
    shown = run(capsys, "bundle", "show", "tumours.bundle", "--code")
    assert {digest, public_key} <= {each for line in shown.splitlines() for each in line.split()}
    assert "class Trainer" in shown
    assert "\x1b" not in shown
    assert "1 characters that do not print" in shown
    write_folder(Path("trainer"), parameters="width = 9\n")
    run(capsys, "bundle", "make", "trainer", "--sign", "my.key", "-o", "new.bundle")
    diff = run(capsys, "bundle", "diff", "tumours.bundle", "new.bundle")
    assert {"-width = 8", "+width = 9"} <= set(diff.splitlines())
    assert "the same" in run(capsys, "bundle", "diff", "new.bundle", "new.bundle")
    Path("new.bundle").write_bytes(b"no bundle")
    assert "not a valid bundle" in run(capsys, "bundle", "show", "new.bundle", code=2)


def test_an_owner_decides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What was decided is listed; the last decision counts."""
    (Path("clinic") / "identity").mkdir(parents=True)
    assert "no bundles yet" in run(capsys, "bundles", "clinic")
    bundle = BundleStore(Path("clinic/bundles")).add(build(tmp_path / "a").content)

    def listed(*options: str) -> tuple[str, str]:
        found = json.loads(run(capsys, "bundles", "clinic", "--json", *options))
        assert found["digest"] == bundle.digest
        return found["approval"], found["by"]

    assert listed() == ("pending", "")
    Path("client.toml").write_text(f'[policy.bundles]\nsigners = ["{SIGNER}"]\n')
    assert listed("--config", "client.toml") == ("approved", "policy.bundles.signers")
    assert "no bundle here" in run(capsys, "approve", "clinic", "0000", code=2)
    assert "is approved" in run(capsys, "approve", "clinic", bundle.digest[:8])
    assert listed() == ("approved", "owner")
    assert "is refused" in run(capsys, "refuse", "clinic", bundle.digest[:8], "--reason", "names")
    assert listed("--config", "client.toml") == ("refused", "owner")
    assert "names" in run(capsys, "bundles", "clinic")
    assert bundle.digest in run(capsys, "bundle", "show", bundle.digest[:6], "--client", "clinic")
