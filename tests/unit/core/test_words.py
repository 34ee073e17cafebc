"""Text that comes from someone else."""

from hypothesis import given
from hypothesis import strategies as st

from fedlearn.core.words import replace_unprintable


@given(st.text())
def test_printable_text_has_no_control_characters_and_keeps_the_rest(text: str) -> None:
    """One replacement for each character, so nothing else moves."""
    shown = replace_unprintable(text)
    assert len(shown) == len(text)
    assert all(each.isprintable() for each in shown)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable())
