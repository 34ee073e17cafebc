"""Take away from this process, on Linux, what code of others must not reach.

:func:`isolate` moves the process into namespaces of its own, as containers have them: without
network, with a file system that holds only what it is given, and without sight of other processes.
It needs no privileges, but a kernel that allows unprivileged user namespaces. What it cannot set up
it reports, and leaves to the caller.

References:
    `user_namespaces(7), mount_namespaces(7), pid_namespaces(7), capabilities(7)
    <https://man7.org/linux/man-pages/>`_.
"""

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_NEW_NS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC = 0x1000, 0x4000, 1 << 18, 2, 4, 8
_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442  # the same on all architectures
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = -100, 0x8000, 1, 2
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 1, 24, 38
_CAPABILITY_VERSION = 0x20080522
_MAX_CAPABILITY = 63

#: A writable folder in an isolated process.
SCRATCH = "/scratch"

#: What Python and native libraries need of the system; no other part of /etc or /dev is visible.
_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/sys"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/etc/alternatives", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """What a process may see once it is isolated.

    Attributes:
        root: An empty folder, on which the new file system is mounted.
        visible: Files and folders that can be read, besides the system's libraries.
        hidden: Folders that are empty, even if they are inside visible ones.
        scratch_bytes: Size of the new file system's own part, in memory, which ends with it.
        devices: Device files that can be used.
    """

    root: str
    visible: Sequence[str]
    hidden: Sequence[str]
    scratch_bytes: int
    devices: Sequence[str] = ()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; only Linux can."""
    if sys.platform == "linux":
        _check(_libc().prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def isolate(sandbox: Sandbox) -> str | None:
    """Isolate this process, which must have one thread; return in a child of it.

    The calling process only waits for the child and exits with its code. The child has no
    network, no capabilities and no way to gain any, sees no other process, and cannot outlive the
    caller. It may write to its part of the file system, such as :data:`SCRATCH`, and nowhere else.

    Returns:
        ``None`` if all of this holds; otherwise why nothing was changed that matters.
    """
    if sys.platform != "linux":
        return "only Linux can isolate a process from network and files"
    uid, gid = os.getuid(), os.getgid()
    try:
        _check(_libc().unshare(_NEW_USER | _NEW_NS | _NEW_NET | _NEW_IPC | _NEW_PID), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    except OSError as error:
        # The kernel's words for this would be "no space left on device".
        is_limit = error.errno == errno.ENOSPC
        why = "user.max_user_namespaces is reached" if is_limit else str(error)
        return f"the system does not allow user namespaces ({why})"
    _become_child()
    try:
        _change_root(sandbox)
        _drop_privileges()
    except OSError as error:
        return f"the system does not allow a file system of its own ({error})"
    return None


def _become_child() -> None:
    """Continue in a child, the first process of the new namespace; the caller waits for it."""
    if sys.platform == "win32":  # `isolate` has checked it
        raise OSError("Windows has no namespaces")
    parent = os.getpid()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    # If this process is killed, all others of its namespace are, too.
    die_with_parent()
    if os.getppid() not in (0, parent):  # 0: the parent is outside the namespace
        os._exit(1)
    os.setsid()  # away from a controlling terminal, into which it could type


def _change_root(sandbox: Sandbox) -> None:
    if sys.platform == "win32":
        raise OSError("Windows has no namespaces")
    root = sandbox.root
    _mount("none", "/", None, _REC | _PRIVATE)
    options = f"size={sandbox.scratch_bytes},mode=755"
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, options)
    for place in _order([*_SYSTEM, *sandbox.visible]):
        _show(root, place)
    for place in sandbox.devices:
        _bind(place, root + place)
    for place in sandbox.hidden:
        if Path(root + place).is_dir():
            _mount("tmpfs", root + place, "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=4k")
    for name in (SCRATCH[1:], "tmp", "dev/shm", "proc", "old"):
        Path(root, name).mkdir(parents=True, exist_ok=True)
    # Without its own /proc, which some containers forbid, it has none: that of the host would show
    # other processes.
    with contextlib.suppress(OSError):
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"unknown architecture {os.uname().machine}")
    old = f"{root}/old"
    _check(_libc().syscall(number, root.encode(), old.encode()), "pivot_root")
    os.chdir(SCRATCH)
    _check(_libc().umount2(b"/old", _DETACH), "umount2")


def _order(places: Iterable[str]) -> list[str]:
    """Sort paths so that a folder comes before what is in it; drop those that do not exist."""
    found = {os.path.normpath(each) for each in places if each and os.path.lexists(each)}
    kept = list[str]()
    for each in sorted(found):
        if not any(each.startswith(f"{other}/") for other in kept):
            kept.append(each)
    return kept


def _show(root: str, place: str) -> None:
    """Make a file or folder visible, read-only."""
    if os.path.islink(place):  # noqa: PTH114 - as in the rest: these are places, not files
        Path(root + place).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(os.readlink(place), root + place)  # noqa: PTH115, PTH211
        if os.path.exists(place):  # noqa: PTH110
            target = os.path.realpath(place)
            if not os.path.lexists(root + target):
                _show(root, target)
        return
    _bind(place, root + place)
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    result = _libc().syscall(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        (root + place).encode(),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"mount_setattr {place}")


def _bind(source: str, target: str) -> None:
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if Path(source).is_dir():
        Path(target).mkdir(exist_ok=True)
    else:
        Path(target).touch()
    _mount(source, target, None, _BIND | _REC)


def _drop_privileges() -> None:
    libc = _libc()
    _check(libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    for number in range(_MAX_CAPABILITY + 1):
        libc.prctl(_CAPBSET_DROP, number, 0, 0, 0)  # fails for those that this kernel lacks
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")


def _mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if each is None else each.encode() for each in (source, target, kind, options)]
    first, second, third, last = encoded
    _check(_libc().mount(first, second, third, ctypes.c_ulong(flags), last), f"mount {target}")


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
