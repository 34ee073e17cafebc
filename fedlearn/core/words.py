"""Handles text from users and other machines: safe printing, and suggestions for typos."""

import difflib
from collections.abc import Iterable


def replace_unprintable(text: str) -> str:
    r"""Replace characters that could control a terminal or reorder a line by U+FFFD.

    Names and reasons come from users and clients, so escape sequences in them must not take effect.

    Example:
        >>> replace_unprintable("lost\x1b[2J power") == "lost\ufffd[2J power"
        True
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name, as part of a message; empty if none is similar.

    Example:
        >>> did_you_mean("oter", ["otter", "yak"])
        "did you mean 'otter'? "
    """
    nearest = difflib.get_close_matches(name, known, n=1)
    # Members of an enumeration are texts, but their repr is not what somebody types.
    return f"did you mean {str(nearest[0])!r}? " if nearest else ""
