"""Words that somebody else has chosen: a user, or another machine."""


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
