"""Calls to Linux that Python 3.11 does not have: namespaces, mounts, capabilities, system call
filters. Each raises an OSError that names the call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# linux/sched.h: CLONE_NEW...
NEW_MOUNTS = 0x00020000
NEW_CGROUP = 0x02000000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000
ALL_NAMESPACES = (
    NEW_MOUNTS | NEW_CGROUP | NEW_HOSTNAME | NEW_IPC | NEW_USER | NEW_PIDS | NEW_NETWORK
)

# linux/mount.h: MS_... of mount and MNT_DETACH of umount2
MOUNT_BIND = 0x1000
MOUNT_RECURSIVE = 0x4000
MOUNT_PRIVATE = 0x40000
MOUNT_READ_ONLY = 0x1
MOUNT_NO_SETUID = 0x2
MOUNT_NO_DEVICES = 0x4
MOUNT_REMOUNT = 0x20
UNMOUNT_DETACH = 2

# linux/mount.h: MOUNT_ATTR_... of mount_setattr; linux/fcntl.h: AT_FDCWD, AT_RECURSIVE
ATTRIBUTE_READ_ONLY = 0x1
ATTRIBUTE_NO_SETUID = 0x2
ATTRIBUTE_NO_DEVICES = 0x4
CURRENT_FOLDER = -100
RECURSIVE = 0x8000

# linux/prctl.h: PR_...; linux/capability.h, linux/seccomp.h
DIE_WITH_PARENT = 1
NO_DUMPS = 4
SECCOMP = 22
DROP_BOUNDING = 24
NO_NEW_PRIVILEGES = 38
AMBIENT = 47
AMBIENT_CLEAR = 4
CAPABILITIES_VERSION = 0x20080522
FILTER_MODE = 2
LAST_CAPABILITY = 63

MOUNT_SETATTR = 442
"""The same number on every architecture, like all calls since Linux 5.1."""
OLDEST = (5, 14)
"""mount_setattr came with 5.12, limits of processes per user namespace with 5.14."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]


def _checked(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int, call: str) -> None:
    """Move this process (NEW_PIDS: its children) into new namespaces; `call` names them."""
    _checked(_libc.unshare(flags), call)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system, or a file or folder a second time."""
    name = None if kind is None else kind.encode()
    result = _libc.mount(os.fsencode(source), os.fsencode(target), name, flags, options.encode())
    _checked(result, f"mount of {target}")


def make_read_only(target: str, attributes: int) -> None:
    """Restrict a mount and all mounts below it."""
    values = struct.pack("=QQQQ", attributes | ATTRIBUTE_READ_ONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(MOUNT_SETATTR),
        ctypes.c_int(CURRENT_FOLDER),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(RECURSIVE),
        ctypes.c_char_p(values),
        ctypes.c_size_t(len(values)),
    )
    _checked(result, f"read-only mount of {target}")


def pivot_to(folder: str) -> None:
    """Make a mounted folder the root; the former root is gone for good."""
    os.chdir(folder)
    number = NUMBERS[platform.machine()].pivot_root
    result = _libc.syscall(ctypes.c_long(number), ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _checked(result, "pivot_root")
    # Both roots lie on each other now: the upper one is the former.
    _checked(_libc.umount2(b".", UNMOUNT_DETACH), "umount of the former root")
    os.chdir("/")


def control(option: int, *values: int) -> None:
    """prctl."""
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(ctypes.c_int(option), *padded), f"prctl {option}")


def drop_bounding() -> None:
    """Give up every privilege that a program with other rights could bring back."""
    for capability in range(LAST_CAPABILITY + 1):
        # The kernel refuses numbers that it does not know.
        _libc.prctl(DROP_BOUNDING, ctypes.c_ulong(capability), 0, 0, 0)
    control(AMBIENT, AMBIENT_CLEAR)


def drop_capabilities() -> None:
    """Give up every privilege of this process."""
    header = struct.pack("=Ii", CAPABILITIES_VERSION, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


class SystemCalls:
    """Numbers of the system calls of an architecture."""

    def __init__(
        self,
        audit: int,
        clone: int,
        socket: int,
        pivot_root: int,
        refused: tuple[int, ...],
    ) -> None:
        self.audit = audit
        self.clone = clone
        self.socket = socket
        self.pivot_root = pivot_root
        self.refused = refused


CLONE3 = 435
NEW_REFUSED = (425, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring_setup, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd,
mount_setattr, memfd_secret.
"""
NUMBERS = {
    # ptrace, process_vm_readv, process_vm_writev, kcmp, unshare, setns, mount, umount2,
    # pivot_root, chroot, memfd_create, shmget, msgget, mq_open, bpf, perf_event_open,
    # userfaultfd, add_key, request_key, keyctl, name_to_handle_at, open_by_handle_at
    "x86_64": SystemCalls(
        0xC000003E,
        56,
        41,
        155,
        (
            101, 310, 311, 312, 272, 308, 165, 166, 155, 161, 319, 29, 68, 240, 321, 298, 323, 248,
            249, 250, 303, 304, *NEW_REFUSED,
        ),
    ),
    "aarch64": SystemCalls(
        0xC00000B7,
        220,
        198,
        41,
        (
            117, 270, 271, 272, 97, 268, 40, 39, 41, 51, 279, 194, 186, 180, 280, 241, 282, 217,
            218, 219, 264, 265, *NEW_REFUSED,
        ),
    ),
}  # fmt: skip
"""What a program may not call: other processes, mounts and namespaces, and memory that no limit
counts.
"""
FAMILIES = (1, 2, 10)
"""Sockets inside of the sandbox: unix, IPv4, IPv6. Others, such as vsock, have no namespace."""

# linux/bpf_common.h: instructions on one 32-bit value, jumps to the next but so many
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
ANSWER = 0x06
# linux/seccomp.h: SECCOMP_RET_...; REFUSE carries the errno that the program gets
ALLOW = 0x7FFF0000
REFUSE = 0x00050000
KILL = 0x80000000
NOT_PERMITTED = 1
NO_SUCH_CALL = 38
NO_SUCH_FAMILY = 97
# struct seccomp_data: what a filter can look at
NUMBER_OFFSET = 0
AUDIT_OFFSET = 4
FIRST_ARGUMENT_OFFSET = 16
X32 = 0x40000000
"""Numbers from here on are those of a second set of system calls of x86_64."""


def filter_program(calls: SystemCalls) -> bytes:
    """The filter of system calls, as instructions of BPF: (code, jump if true, if false, value)."""
    steps: list[tuple[int, int, int, int]] = [
        # The same number is another call on another architecture.
        (LOAD, 0, 0, AUDIT_OFFSET),
        (EQUAL, 1, 0, calls.audit),
        (ANSWER, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
        (AT_LEAST, 0, 1, X32),
        (ANSWER, 0, 0, REFUSE | NOT_PERMITTED),
        # glibc and Python use clone where clone3 does not exist; its flags can be read here.
        (EQUAL, 0, 1, CLONE3),
        (ANSWER, 0, 0, REFUSE | NO_SUCH_CALL),
    ]
    for number in calls.refused:
        steps.append((EQUAL, 0, 1, number))
        steps.append((ANSWER, 0, 0, REFUSE | NOT_PERMITTED))
    # A process may be cloned, but into no new namespace.
    steps += [
        (EQUAL, 0, 4, calls.clone),
        (LOAD, 0, 0, FIRST_ARGUMENT_OFFSET),
        (ANY_BIT, 0, 1, ALL_NAMESPACES),
        (ANSWER, 0, 0, REFUSE | NOT_PERMITTED),
        (ANSWER, 0, 0, ALLOW),
        (EQUAL, 0, 2 + len(FAMILIES), calls.socket),
        (LOAD, 0, 0, FIRST_ARGUMENT_OFFSET),
    ]
    for position, family in enumerate(FAMILIES):
        # To the last step, which allows.
        steps.append((EQUAL, len(FAMILIES) - position, 0, family))
    steps.append((ANSWER, 0, 0, REFUSE | NO_SUCH_FAMILY))
    steps.append((ANSWER, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def filter_system_calls() -> None:
    """Refuse the calls of `NUMBERS` from now on, here and in all children."""
    steps = filter_program(NUMBERS[platform.machine()])
    memory = ctypes.create_string_buffer(steps, len(steps))
    program = _Program(len(steps) // 8, ctypes.addressof(memory))
    control(SECCOMP, FILTER_MODE, ctypes.addressof(program))
