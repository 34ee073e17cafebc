"""Formats numbers, durations and sizes for people."""

import math

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_GIB, _MIB = 2**30, 2**20


def format_number(value: float | None) -> str:
    """Format a metric with four decimals, or with four digits if it is large; ``None`` is a dash.

    Example:
        >>> [format_number(value) for value in (0.91234, 123456.7, -0.00001, None, math.nan)]
        ['0.9123', '1.235e+05', '0.0000', '-', 'nan']
    """
    if value is None:
        return "-"
    # `z` writes what rounds to zero without a sign.
    return f"{value:z.4f}" if abs(value) < 1000 else f"{value:.4g}"  # noqa: PLR2004 (a width)


def format_difference(value: float) -> str:
    """Format a difference like :func:`format_number`, with its sign unless it rounds to zero.

    Example:
        >>> [format_difference(value) for value in (0.91234, -0.5, -0.00001, 0.0)]
        ['+0.9123', '-0.5000', '0.0000', '0.0000']
    """
    text = format_number(value)
    return f"+{text}" if value > 0.0 and float(text) != 0.0 else text


def format_amount(value: float | None) -> str:
    """Format a count or a quantity: whole and large numbers in full, others with four decimals.

    Example:
        >>> [format_amount(value) for value in (3.0, 53.61234, -17660.4, None)]
        ['3', '53.6123', '-17660', '-']
    """
    if value is None or not math.isfinite(value) or abs(value) >= 1e15:  # noqa: PLR2004 - not exact
        return format_number(value)
    is_whole = value == round(value)
    return f"{value:z.0f}" if is_whole or abs(value) >= 1000 else f"{value:z.4f}"  # noqa: PLR2004 (a width)


def format_duration(seconds: float) -> str:
    """Format a duration in at most eight characters; a dash if it is not finite.

    Example:
        >>> [format_duration(s) for s in (0.0421, 8.13, 75.0, 3720.0, 180000.0)]
        ['42 ms', '8.1 s', '1m 15s', '1h 02m', '2d 02h']
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:  # noqa: PLR2004 (what does not round to a second)
        return f"{1000 * seconds:.0f} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m {whole % _MINUTE_S:02d}s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h {whole % _HOUR_S // _MINUTE_S:02d}m"
    return f"{whole // _DAY_S}d {whole % _DAY_S // _HOUR_S:02d}h"


def choose_time_unit(longest_s: float) -> tuple[str, float]:
    """Choose the unit of time for an axis up to ``longest_s``; return its name and its seconds."""
    units = (("days", _DAY_S), ("hours", _HOUR_S), ("minutes", _MINUTE_S))
    return next((unit for unit in units if longest_s >= 2 * unit[1]), ("seconds", 1))


def format_size(size: int) -> str:
    """Format a number of bytes in MiB or GiB.

    Example:
        >>> format_size(3 * 2**20), format_size(350_000_000_000)
        ('3.00 MiB', '325.96 GiB')
    """
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.2f} MiB"
