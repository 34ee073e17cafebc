"""Removes passwords from URLs and from text to show."""

import re

_URL_PASSWORD = re.compile(r"(://[^:/@]*):.*@", re.DOTALL)  # greedy: a password may hold "@"
_QUERY_PASSWORD = re.compile(r"(?i)([?&](?:password|passwd|pwd|sslpassword)=)[^&]*")


def remove_password(url: str) -> str:
    """Remove the password from ``url``, and query parameters that contain one."""
    address, mark, query = _URL_PASSWORD.sub(r"\1@", url).partition("?")
    kept = [part for part in query.split("&") if not _QUERY_PASSWORD.match(f"?{part}")]
    return address + (mark if kept else "") + "&".join(kept)


def redact(text: str) -> str:
    """Replace the passwords of URLs in a text by ``***``."""
    return _QUERY_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1:***@", text))
