"""Attacks on bundles: each is refused, and the control without the attack is not."""

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.bundle_store import Approval, BundleStore
from fedlearn.core.clock import SystemClock
from fedlearn.errors import ConfigError, DeploymentError
from fedlearn.identity.bundle_folder import make_bundle
from fedlearn.identity.bundles import (
    LABEL,
    MAX_BYTES,
    Bundle,
    Manifest,
    PackedFile,
    digest_of,
    pack,
)
from tests.bundles import RESEARCHER, SIGNER, STRANGER, build, write_folder

_LOCK = "numpy==2.1.0 \\\n    --hash=sha256:" + "a" * 64 + "\n"


def _forge(bundle: Bundle, change: Callable[[Manifest], Manifest], **files: bytes) -> bytes:
    """Sign another manifest with the researcher's own key, as a hostile researcher may."""
    manifest = change(bundle.manifest)
    signature = RESEARCHER.sign(LABEL, manifest.values())
    return pack(manifest, signature=signature, files={**bundle.files, **files})


def test_the_same_folder_and_key_give_the_same_bytes(tmp_path: Path) -> None:
    """Times and caches do not count. Control: one character of code does."""
    first = build(tmp_path / "a")
    folder = write_folder(tmp_path / "b")
    os.utime(folder / "trainer.py", (0, 0))
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "trainer.pyc").write_bytes(b"\x00")
    assert make_bundle(folder, RESEARCHER).content == first.content
    assert build(tmp_path / "c", code="class Trainer: pass\n").digest != first.digest
    with tarfile.open(fileobj=io.BytesIO(first.content)) as archive:
        names = archive.getnames()
    assert names[:2] == ["manifest.json", "signature"]
    assert "files/trainer.py" in names


@given(st.data())
def test_no_byte_of_a_bundle_can_change(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is flipped, cut or appended: names, modes, times, padding, code, signature."""
    content = build(tmp_path_factory.getbasetemp() / "bundle").content
    assert Bundle.parse(content).content == content
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    for attempt in (bytes(changed), content[:at], content + bytes(512)):
        with pytest.raises(DeploymentError):
            Bundle.parse(attempt)


@pytest.mark.parametrize(
    "path",
    ["../evil.py", "/etc/evil.py", "a/../evil.py", "a//b.py", ".hidden", "a\\b.py", "con.py", ""],
)
def test_paths_stay_inside_the_bundle(tmp_path: Path, path: str) -> None:
    """Even if the researcher signs them."""
    bundle = build(tmp_path)

    def add(path: str) -> bytes:
        packed = PackedFile(sha256=digest_of(b""), num_bytes=0)
        change = lambda m: replace(m, files={**m.files, path: packed})  # noqa: E731
        return _forge(bundle, change, **{path: b""})

    assert "fine.py" in Bundle.parse(add("fine.py")).files
    with pytest.raises(DeploymentError, match="is not allowed"):
        Bundle.parse(add(path))


def test_links_and_other_members_are_refused(tmp_path: Path) -> None:
    """An archive that tar would take, with one more member; and links in a folder."""
    folder = write_folder(tmp_path / "a")
    bundle = make_bundle(folder, RESEARCHER)
    link = tarfile.TarInfo("files/passwd")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    added = bundle.content[:-1024] + link.tobuf(tarfile.USTAR_FORMAT) + bytes(1024)
    with pytest.raises(DeploymentError, match="size"):
        Bundle.parse(added)
    (folder / "link.py").symlink_to("/etc/passwd")
    with pytest.raises(DeploymentError, match="is a link"):
        make_bundle(folder, RESEARCHER)


def test_bombs_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """A compressed archive, a manifest that announces gigabytes, and one with many files."""
    bundle = build(tmp_path)
    compressed = io.BytesIO()
    with tarfile.open(fileobj=compressed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("manifest.json"), io.BytesIO())
    huge = PackedFile(sha256="0" * 64, num_bytes=1 << 32)
    files = {"trainer.py": huge, **{f"f{n}.py": huge for n in range(1000)}}
    for attempt in (
        compressed.getvalue(),
        bytes(MAX_BYTES + 1),
        _forge(bundle, lambda m: replace(m, files={**m.files, "trainer.py": huge})),
        _forge(bundle, lambda m: replace(m, files=files), **dict.fromkeys(files, b"")),
    ):
        with pytest.raises(DeploymentError):
            Bundle.parse(attempt)


def test_a_signature_of_another_key_is_refused(tmp_path: Path) -> None:
    """A manifest that names a trusted key needs that key's signature."""
    bundle = build(tmp_path)
    manifest = replace(bundle.manifest, version="2.0")
    signature = STRANGER.sign(LABEL, manifest.values())
    with pytest.raises(DeploymentError, match="not signed by the key"):
        Bundle.parse(pack(manifest, signature=signature, files=bundle.files))


@pytest.mark.parametrize("code", ["# -*- coding: utf-7 -*-\n", "# coding: latin-1\n"])
def test_code_is_read_as_it_runs(tmp_path: Path, code: str) -> None:
    """Python would decode the file in another way than the owner's screen."""
    with pytest.raises(DeploymentError, match="UTF-8"):
        build(tmp_path, code=code)
    assert build(tmp_path, code="# coding: utf-8\n").files


@pytest.mark.parametrize(
    "line", ["numpy", "numpy>=2 --hash=sha256:" + "a" * 64, "numpy==2.*", "numpy==2.1.0", "-e ."]
)
def test_requirements_are_pinned_with_hashes(tmp_path: Path, line: str) -> None:
    """Control: a line of pip-compile."""
    found = build(tmp_path, requirements=f"# by pip-compile\n{_LOCK}    # via x\n")
    assert [str(each) for each in found.manifest.requirements] == ["numpy==2.1.0"]
    with pytest.raises(ConfigError, match="pip-compile"):
        build(tmp_path, requirements=line)


def test_only_what_the_policy_names_is_approved_by_rule(tmp_path: Path) -> None:
    """An unknown signer or package waits for the owner; a known one does not."""
    store = BundleStore(tmp_path / "bundles")
    plain = store.add(build(tmp_path / "a").content)
    needy = store.add(build(tmp_path / "b", requirements=_LOCK).content)
    trusting = BundlePolicy(signers=(SIGNER,), packages=("numpy>=2.2",))
    decide = store.read_decision
    assert decide(plain, BundlePolicy()).approval is Approval.PENDING
    assert decide(plain, BundlePolicy(signers=("ab" * 32,))).approval is Approval.PENDING
    assert decide(plain, trusting).by == "policy.bundles.signers"
    assert "numpy==2.1.0" in decide(needy, trusting).reason
    assert decide(needy, replace(trusting, packages=("NumPy>=2",))).is_approved
    store.decide(plain.digest, Approval.REFUSED, reason="no", clock=SystemClock())
    assert decide(plain, trusting).approval is Approval.REFUSED


def test_only_parameters_may_change_without_asking(tmp_path: Path) -> None:
    """Against a bundle that the owner approved. Controls: code, another signer, a refused one."""
    store, policy = BundleStore(tmp_path / "bundles"), BundlePolicy(parameter_changes=True)
    first = store.add(build(tmp_path / "a").content)
    changed = build(tmp_path / "b", parameters="width = 16\n", version="1.1")
    assert not store.read_decision(changed, policy).is_approved
    store.decide(first.digest, Approval.APPROVED, reason="", clock=SystemClock())
    assert store.read_decision(changed, policy).by == "policy.bundles.parameter_changes"
    assert not store.read_decision(changed, BundlePolicy()).is_approved
    for unlike in (
        build(tmp_path / "c", code="import os\nclass Trainer: ...\n"),
        build(tmp_path / "d", STRANGER, parameters="width = 16\n"),
        build(tmp_path / "e", requirements=_LOCK),
    ):
        assert not store.read_decision(unlike, policy).is_approved


def test_a_bundle_that_changes_on_disk_does_not_run(tmp_path: Path) -> None:
    """After its approval, even into another valid bundle."""
    store = BundleStore(tmp_path / "bundles")
    bundle = store.add(build(tmp_path / "a").content)
    store.decide(bundle.digest, Approval.APPROVED, reason="", clock=SystemClock())
    assert store.load(bundle.digest).content == bundle.content
    path = tmp_path / "bundles" / f"{bundle.digest}.bundle"
    path.write_bytes(build(tmp_path / "b", code="class Trainer: evil = 1\n").content)
    with pytest.raises(DeploymentError, match="does not have the digest"):
        store.load(bundle.digest)
