"""The fingerprint of a site's own trainer."""

from pathlib import Path

from fedlearn.client.fingerprint import describe_trainer, fingerprint_of
from fedlearn.client.loading import make_trainer

_CODE = """
class Trainer:
    honors = ()
    def train(self): ...
    def evaluate(self): ...
"""


def _fingerprint(file: Path, code: str) -> str:
    file.parent.mkdir()
    file.write_text(code)
    return fingerprint_of(make_trainer(f"{file}:Trainer"))


def test_it_covers_the_source_and_the_packages(tmp_path: Path) -> None:
    """The same source has the same one; a comment more changes it."""
    first = _fingerprint(tmp_path / "a" / "trainer.py", _CODE)
    assert first == _fingerprint(tmp_path / "b" / "trainer.py", _CODE)
    assert first != _fingerprint(tmp_path / "c" / "trainer.py", f"{_CODE}# new\n")
    assert first.startswith("site:")
    packages = describe_trainer(object())["packages"]
    assert isinstance(packages, dict)
    assert "torch" in packages
