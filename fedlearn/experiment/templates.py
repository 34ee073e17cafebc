"""The environment of all HTML templates: it escapes, and formats numbers and odd characters."""

from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable


def make_environment(loader: BaseLoader) -> Environment:
    """Return an environment that escapes all text from users and clients."""
    return Environment(
        loader=loader,
        autoescape=True,
        finalize=_format,
        # A misspelled name in the template raises, instead of printing nothing.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _format(value: Any) -> Any:  # of any type that a template prints
    """Format a value for the page, before it is escaped."""
    if isinstance(value, float):
        return format_number(value)
    return (
        replace_unprintable(value)
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )
