"""Times that come again, by cron's syntax in a time zone."""

from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from fedlearn.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """When something is due again and again.

    At changes of daylight-saving time it does as Debian's cron: a time that a change skips is due
    right after it, and one that a change repeats is due once. Rules with ``*`` in the hour or
    minute follow the elapsed time.

    Attributes:
        cron: Minute, hour, day of month, month and day of week, as in ``"0 2 * * *"``.
        timezone: Name of the time zone of these, as in ``"Europe/Berlin"``.

    Raises:
        ConfigError: One of them is wrong, or the package for cron's syntax is not installed.

    Example:
        >>> nightly = Recurrence(cron="30 2 * * *", timezone="Europe/Berlin")
        >>> evening = datetime(2026, 3, 28, 20, 0, tzinfo=UTC).timestamp()
        >>> datetime.fromtimestamp(nightly.find_next(evening), UTC).isoformat()  # 2:30 is skipped
        '2026-03-29T01:00:00+00:00'
    """

    cron: str
    timezone: str

    def __post_init__(self) -> None:
        self.find_next(0.0)

    def find_next(self, after_unix_s: float) -> float:
        """Return the first time after ``after_unix_s`` that is due, in seconds since 1970."""
        try:
            from cronsim import CronSim, CronSimError  # noqa: PLC0415 (optional)
        except ImportError as error:
            raise ConfigError(
                "schedules need the package cronsim, which reads cron's syntax; install it: "
                "pip install 'fedlearn[schedules]'"
            ) from error
        try:
            zone = ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise ConfigError(
                f"--timezone {self.timezone}: there is no such time zone; give a name such as UTC "
                "or Europe/Berlin (on systems without time zones, install the package tzdata)"
            ) from error
        after = datetime.fromtimestamp(after_unix_s, UTC).astimezone(zone)
        try:
            return next(CronSim(self.cron, after)).timestamp()
        except (CronSimError, StopIteration) as error:
            why = str(error) or "no such day"
            raise ConfigError(
                f"--cron {self.cron!r} is never due ({why}); give five fields: "
                "minute, hour, day of month, month, day of week, as in '0 2 * * *'"
            ) from error
