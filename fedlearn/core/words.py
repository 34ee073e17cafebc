"""Words that somebody else has chosen: a user, or another machine."""

import difflib
from collections.abc import Iterable


def printable(text: str) -> str:
    r"""Return ``text`` with U+FFFD for what could steer a terminal or reorder a line.

    Names and reasons come from users and clients: an escape sequence among them is data.

    Example:
        >>> printable("lost\x1b[2J power") == "lost\ufffd[2J power"
        True
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question for the middle of a message; nothing if no known name is near.

    Example:
        >>> did_you_mean("oter", ["otter", "yak"])
        "did you mean 'otter'? "
    """
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]!r}? " if nearest else ""
