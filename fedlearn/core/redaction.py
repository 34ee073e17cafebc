"""Passwords in URLs: found, removed, and never shown."""

import re

_URL_PASSWORD = re.compile(r"(://[^:/@]*):.*@", re.DOTALL)  # greedy: a password may hold "@"
_QUERY_PASSWORD = re.compile(r"(?i)([?&](?:password|passwd|pwd|sslpassword)=)[^&]*")


def without_password(url: str) -> str:
    """Return ``url`` with neither a password nor a query parameter that holds one."""
    address, mark, query = _URL_PASSWORD.sub(r"\1@", url).partition("?")
    kept = [part for part in query.split("&") if not _QUERY_PASSWORD.match(f"?{part}")]
    return address + (mark if kept else "") + "&".join(kept)


def redacted(text: str) -> str:
    """Return a text to show, without the password of a URL in it."""
    return _QUERY_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1:***@", text))
