"""How lines of the log are written. Needs no logging library, so an application can name it."""

from enum import StrEnum
from typing import Final


class LogFormat(StrEnum):
    """How lines of the log are written.

    Attributes:
        AUTO: As text in a terminal, as JSON elsewhere.
        TEXT: As text, for people.
        JSON: As one JSON object a line, also for warnings and logs of other libraries.
    """

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


#: Environment variable that names a format, for a command or a process that it starts.
LOG_FORMAT_VARIABLE: Final = "FEDLEARN_LOG_FORMAT"
