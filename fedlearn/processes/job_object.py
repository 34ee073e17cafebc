"""A Windows job object, which kills its processes when the last handle to it closes.

The kernel closes the handles of a process that dies, so the processes that an application puts in a
job end with the application, even if it crashes.
"""

import ctypes
import sys
from typing import ClassVar

_KILL_ON_JOB_CLOSE = 0x2000
_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation
_SET_QUOTA_AND_TERMINATE = 0x0100 | 0x0001
_ENDED_BY_US = 1


class _BasicLimits(ctypes.Structure):
    """JOBOBJECT_BASIC_LIMIT_INFORMATION."""

    _fields_: ClassVar = [
        ("per_process_user_time", ctypes.c_int64),
        ("per_job_user_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("minimum_working_set", ctypes.c_size_t),
        ("maximum_working_set", ctypes.c_size_t),
        ("active_process_limit", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority_class", ctypes.c_uint32),
        ("scheduling_class", ctypes.c_uint32),
    ]


class _ExtendedLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_: ClassVar = [
        ("basic", _BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    ]


if sys.platform == "win32":

    class JobObject:
        """A job of one process and all its descendants.

        Args:
            pid: Process id of the process, which must not have started any others yet.

        Raises:
            OSError: Windows refuses.
        """

        def __init__(self, pid: int) -> None:
            self._kernel = ctypes.WinDLL("kernel32", use_last_error=True)
            # Handles have 64 bits; by default ctypes would cut them to the 32 bits of an int.
            self._kernel.CreateJobObjectW.restype = ctypes.c_void_p
            self._kernel.OpenProcess.restype = ctypes.c_void_p
            self._job = ctypes.c_void_p(self._kernel.CreateJobObjectW(None, None))
            limits = _ExtendedLimits()
            limits.basic.flags = _KILL_ON_JOB_CLOSE
            process = ctypes.c_void_p(self._kernel.OpenProcess(_SET_QUOTA_AND_TERMINATE, 0, pid))
            is_made = self._kernel.SetInformationJobObject(
                self._job, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits)
            ) and self._kernel.AssignProcessToJobObject(self._job, process)
            # Before CloseHandle, which sets the last error again.
            error = None if is_made else ctypes.WinError(ctypes.get_last_error())
            self._kernel.CloseHandle(process)
            if error is not None:
                self.close()
                raise error

        def end(self) -> None:
            """Kill all processes of the job."""
            self._kernel.TerminateJobObject(self._job, _ENDED_BY_US)

        def close(self) -> None:
            """Close the job, which kills its processes."""
            self._kernel.CloseHandle(self._job)
