"""States of processes that CRIU does not carry, changes, or restores so that they do harm.

A restored process would lose the permission to use AMX, without which its next matrix instruction raises SIGILL, the
denial of writable and executable memory (``PR_SET_MDWE``), and others. The kernel shows none of them in ``/proc``, so
the process, which is traced, is made to execute the queries: its registers, signal mask and memory are restored.

Calls of poll(2) and others that a stop has interrupted fail with EINTR after a dump, in the process and in its image:
CRIU does not repeat what the kernel repeats by restart_syscall(2) (``compel/arch/x86/src/lib/infect.c``). epoll_wait(2)
fails after any stop, as do sigtimedwait(2) and calls for sockets with a time limit (signal(7)).

All of this is for x86-64. Processes of other architectures are not queried; AMX is not one of their features.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

from slurm_affinode.base import ptrace
from slurm_affinode.base.pidfd import Process, ProcessGoneError, SharedPart
from slurm_affinode.checkpoint.image.criu_images import (
    BadImage,
    bodies,
    encoded,
    framed,
    image_records,
    integer,
    repeated,
    spans,
)
from slurm_affinode.checkpoint.image.private_image import PrivateImage

_TRACE_SYSCALLS, _SUSPEND_SECCOMP = 1, 1 << 21
_SYSCALL_STOP, _EVENT_STOP = 5 | 0x80, 128
_GENERAL_REGISTERS = 1  # NT_PRSTATUS
_ANY_CHILD = 0x40000000  # __WALL
_WAIT_S = 5.0
_PAUSE_S = 0.0005
"""Between two checks of a thread, which usually stops within microseconds, and has the CPU meanwhile."""
_NAMES = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base "
    "ds es fs gs"
)
"""Of ``struct user_regs_struct``."""
_BELOW_STACK = 512
"""Distance of the buffer for results from the top of the stack: beyond the 128 bytes that a function may use."""
_INSTRUCTION = b"\x0f\x05"
_MODIFY_LDT, _PRCTL, _ARCH_PRCTL, _RESTART = 154, 157, 158, 219
_NO_CALL = (1 << 64) - 1
_LOAD = b"\xb8"
"""``mov $NUMBER,%eax``."""
_RESTARTED, _RESTARTED_BY_CALL = (-512, -513, -514), -516
"""Values that the kernel puts in place of a result when it is to repeat an interrupted call (``linux/errno.h``)."""
_EINTR = -4
_LONGEST_REPEATED_S = 60
"""Of the calls whose remaining time the kernel does not show: they last up to this time longer, but never end early. A
longer one might never end in a job that is suspended again and again before."""
_FUTEX_COMMAND, _FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0x7F, 0, 9  # linux/futex.h
_MOST_STOPS = 100
"""Of a thread on its way to a system call, or out of it."""
_MAGICS = 8  # bytes
_PID, _THREADS = 1, 5  # fields of pstree_entry in images/pstree.proto
_THREAD_CORE, _SIGNAL = 5, 8  # images/core.proto
_BUFFER = -1
_STRICT = "1"
_XCOMP_PERM = 0x1022


@dataclass(frozen=True, slots=True)
class _Query:
    """A system call that returns a state, or writes it to a buffer (``_BUFFER`` among the arguments)."""

    number: int
    arguments: tuple[int, ...]
    usual: int
    """The state of an ordinary process."""
    name: str
    mask: int = -1
    """The bits that matter."""
    returned: bool = False
    """The call also returns the state."""
    implied: bool = False
    """The strict mode of seccomp, which CRIU restores, implies another state."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """A system call that waits until a time limit, and the registers of its arguments."""

    timeout: str | None
    """``None``: the time limit is that of the socket in the first argument (``SO_RCVTIMEO``)."""
    interrupted: int = _RESTARTED_BY_CALL
    """The result that the kernel gives to the call when a stop interrupts it."""
    milliseconds: bool = False
    """The time limit is in the register, negative for none, instead of in a ``struct timespec``."""
    remaining: str | None = None
    """Where the call has written its remaining time."""
    flags: str | None = None
    """If they are not 0, the time limit is a point in time, and the kernel repeats the call itself."""


_WAITS = {
    7: _Wait("rdx", milliseconds=True),  # poll
    35: _Wait("rdi", remaining="rsi"),  # nanosleep
    128: _Wait("rdx", _EINTR),  # rt_sigtimedwait
    202: _Wait("r10"),  # futex
    230: _Wait("rdx", remaining="r10", flags="rsi"),  # clock_nanosleep
    232: _Wait("r10", _EINTR, milliseconds=True),  # epoll_wait
    281: _Wait("r10", _EINTR, milliseconds=True),  # epoll_pwait
    441: _Wait("r10", _EINTR),  # epoll_pwait2
    # read, readv, accept, recvfrom, recvmsg, accept4
    **dict.fromkeys((0, 19, 43, 45, 47, 288), _Wait(None, _EINTR)),
}
_FUTEX = 202

_QUERIES = (
    _Query(_PRCTL, (66, 0, 0, 0, 0), 0, "forbidden writable and executable memory (PR_SET_MDWE)"),
    _Query(_PRCTL, (68, 0, 0, 0, 0), 0, "requested to merge equal pages (PR_SET_MEMORY_MERGE)"),
    _Query(_PRCTL, (34, 0, 0, 0, 0), 2, "chosen a policy for memory errors (PR_MCE_KILL)"),
    _Query(_PRCTL, (25, _BUFFER, 0, 0, 0), 1, "disabled the time stamp counter (PR_SET_TSC)", implied=True),
    _Query(_MODIFY_LDT, (0, _BUFFER, 8), 0, "made segments of its own (modify_ldt)", returned=True),
    _Query(_ARCH_PRCTL, (0x1011, 0), 1, "disabled the CPUID instruction (ARCH_SET_CPUID)"),
)


_PARTS = {
    SharedPart.DESCRIPTORS: "a thread with descriptors of its own (CLONE_FILES)",
    SharedPart.DIRECTORIES: "a thread with a working directory of its own (CLONE_FS)",
}
"""CRIU restores those of the process for all of its threads."""


class _Registers(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _NAMES.split())


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def lost(process: Process) -> str | None:
    """Return a state of a process that a restore would lose, in words that follow *has*; ``None``: there is none.

    All threads of the process are stopped, and traced by the calling thread. One of them is queried: a state that the
    kernel keeps for each thread is that of the thread by which it was created, unless it has changed it. Raises
    ``OSError`` if the process has ended, or cannot be examined.
    """
    if os.uname().machine != "x86_64":
        return None
    for part, text in _PARTS.items():
        if not process.threads_share(part):
            return text
    if any(map(_dispatches, process.threads())):
        return "requested to handle its system calls itself (PR_SET_SYSCALL_USER_DISPATCH)"
    strict = process.status().get("Seccomp") == _STRICT
    with _queried(process) as tracee:
        for query in _queries():
            if strict and query.implied:
                continue
            value = tracee.result(query)
            if value is not None and value & query.mask != query.usual & query.mask:
                return query.name
    return None


def _dispatches(thread: int) -> bool:
    """Return whether a thread has the kernel deliver its system calls to a handler; ``False`` before Linux 6.4."""
    configuration = (ctypes.c_uint64 * 4)()  # struct ptrace_sud_config, which begins with the mode
    with suppress(OSError):
        ptrace.ptrace(
            ptrace.GET_SYSCALL_USER_DISPATCH_CONFIG,
            thread,
            ctypes.sizeof(configuration),
            ctypes.addressof(configuration),
        )
    return configuration[0] != 0


@cache
def _queries() -> tuple[_Query, ...]:
    """Return all queries, with that of the CPU features that a process may use beyond those of this one."""
    libc, value = ctypes.CDLL(None), ctypes.c_uint64()
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(_ARCH_PRCTL, _XCOMP_PERM, ctypes.byref(value)) != 0:
        return _QUERIES
    text = "requested a CPU feature (AMX, ARCH_REQ_XCOMP_PERM)"
    return (*_QUERIES, _Query(_ARCH_PRCTL, (_XCOMP_PERM, _BUFFER), 0, text, ~value.value))


def repeat_waits(process: Process) -> None:
    """Let calls that a stop has interrupted while they waited begin again when the process continues.

    Those without a time limit, with one that is a point in time, and with one of up to a minute begin again as they
    were, and nanosleep(2) with its remaining time. All threads of the process are stopped, and traced by the calling
    thread. A thread that is about to run a handler of a signal is not changed: it may depend on EINTR. Raises
    ``OSError``.
    """
    if os.uname().machine != "x86_64":
        return
    memory = process.open("mem", os.O_RDONLY)
    try:
        for thread in process.threads():
            with suppress(OSError):  # the thread has ended, or has registers of 32 bits
                registers = _registers(thread)
                number = _repeated(registers, memory, process)
                if number is not None and not _will_handle(process.status(f"task/{thread}/status")):
                    registers.rax, registers.orig_rax = number, _NO_CALL
                    registers.rip -= len(_INSTRUCTION)
                    _set_registers(thread, registers)
    finally:
        os.close(memory)


def _repeated(registers: _Registers, memory: int, process: Process) -> int | None:
    """Return the number of the call to begin again, with its arguments in place. Raises ``OSError``."""
    number, result = (ctypes.c_int64(value).value for value in (registers.orig_rax, registers.rax))
    if number == _RESTART and result == _RESTARTED_BY_CALL:  # it had been interrupted before
        length = len(_LOAD) + 4
        code = _peek(memory, length + len(_INSTRUCTION), registers.rip - length - len(_INSTRUCTION))
        if code[:1] != _LOAD or code[length:] != _INSTRUCTION:
            return None
        number = int.from_bytes(code[1:length], "little")
    wait = _WAITS.get(number)
    if wait is None or result != wait.interrupted or (wait.flags is not None and getattr(registers, wait.flags)):
        return None
    if wait.timeout is None:
        return number if _time_limit_of_socket(process, registers.rdi) <= _LONGEST_REPEATED_S else None
    remaining = wait.remaining and getattr(registers, wait.remaining)
    if remaining:
        setattr(registers, wait.timeout, remaining)
        return number
    if number == _FUTEX:
        command = registers.rsi & _FUTEX_COMMAND
        if command == _FUTEX_WAIT_BITSET:
            return number
        if command != _FUTEX_WAIT:
            return None
    limit_s = _time_limit(getattr(registers, wait.timeout), memory, milliseconds=wait.milliseconds)
    return number if limit_s is None or limit_s <= _LONGEST_REPEATED_S else None


def _time_limit(value: int, memory: int, *, milliseconds: bool) -> float | None:
    """Return the time limit of a call in seconds; ``None``: it has none. Raises ``OSError``."""
    if milliseconds:
        limit_ms = ctypes.c_int32(value & 0xFFFFFFFF).value
        return None if limit_ms < 0 else limit_ms / 1000
    if value == 0:
        return None
    seconds, nanoseconds = struct.unpack("qq", _peek(memory, 16, value))
    return float(seconds + nanoseconds / 1e9)


def _peek(memory: int, length: int, address: int) -> bytes:
    """Read memory at an address that the process has chosen. Raises ``OSError`` if any of it cannot be read."""
    with suppress(OverflowError):  # beyond 63 bits
        if len(data := os.pread(memory, length, address)) == length:
            return data
    raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def _time_limit_of_socket(process: Process, number: int) -> float:
    """Return the time limit of a socket in seconds; 0: it has none. Raises ``OSError``, also for another file."""
    with process.as_socket(number & 0xFFFFFFFF) as opened:  # as the kernel takes it
        seconds, microseconds = struct.unpack("ll", opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        return float(seconds + microseconds / 1e6)


def _will_handle(status: Mapping[str, str]) -> bool:
    """Return whether a thread calls a handler as soon as it continues."""
    private, shared, blocked, caught = (
        int(status.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk", "SigCgt")
    )
    return bool((private | shared) & ~blocked & caught)


def _registers(thread: int) -> _Registers:
    registers = _Registers()
    vector = _Vector(ctypes.addressof(registers), ctypes.sizeof(registers))
    ptrace.ptrace(ptrace.GETREGSET, thread, _GENERAL_REGISTERS, ctypes.addressof(vector))
    if vector.length != ctypes.sizeof(registers):
        raise OSError(0, "it is a program for 32 bits")
    return registers


def _set_registers(thread: int, registers: _Registers) -> None:
    vector = _Vector(ctypes.addressof(registers), ctypes.sizeof(registers))
    ptrace.ptrace(ptrace.SETREGSET, thread, _GENERAL_REGISTERS, ctypes.addressof(vector))


class _Tracee:
    """A stopped thread of a process, in which system calls are executed."""

    def __init__(self, thread: int, memory: int, instruction: int) -> None:
        self._thread, self._memory, self._instruction = thread, memory, instruction
        self._saved = _registers(thread)
        self.signals: list[int] = []
        """Signals that were about to be delivered, and were not."""

    def result(self, query: _Query) -> int | None:
        """Return a state, or ``None`` if the kernel does not have it."""
        if _BUFFER not in query.arguments:
            value = self._call(query.number, query.arguments)
            return None if value < 0 else value
        buffer = (self._saved.rsp - _BELOW_STACK) & ~0xF
        before = os.pread(self._memory, 8, buffer)
        os.pwrite(self._memory, bytes(8), buffer)
        try:
            value = self._call(
                query.number, [buffer if argument == _BUFFER else argument for argument in query.arguments]
            )
            written = os.pread(self._memory, 8, buffer)
        finally:
            os.pwrite(self._memory, before, buffer)
        if value < 0:
            return None
        return value if query.returned else int.from_bytes(written, "little")

    def _call(self, number: int, arguments: Sequence[int]) -> int:
        registers = _copy(self._saved)
        registers.rax, registers.orig_rax, registers.rip = number, _NO_CALL, self._instruction
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8"), arguments, strict=False):
            setattr(registers, name, value)
        _set_registers(self._thread, registers)
        for _ in ("entry", "exit"):
            for _ in range(_MOST_STOPS):
                ptrace.ptrace(ptrace.SYSCALL, self._thread)
                status = _wait(self._thread)
                if os.WSTOPSIG(status) == _SYSCALL_STOP:
                    break
                if status >> 16 == _EVENT_STOP:  # that of a process that was stopped before, or of the interruption
                    continue
                if os.WSTOPSIG(status) != signal.SIGSTOP:  # all others are blocked: it has changed its vDSO
                    raise OSError(0, f"it is stopped by signal {os.WSTOPSIG(status)}")
                self.signals.append(signal.SIGSTOP)
            else:
                raise OSError(0, "it is stopped again and again")
        return ctypes.c_int64(_registers(self._thread).rax).value

    def restore(self) -> None:
        """Restore the registers. The kernel repeats a call that was interrupted only in its own way to the process."""
        registers, value = _copy(self._saved), ctypes.c_int64(self._saved.rax).value
        if ctypes.c_int64(registers.orig_rax).value >= 0 and value in (*_RESTARTED, _RESTARTED_BY_CALL):
            registers.rax = _RESTART if value == _RESTARTED_BY_CALL else registers.orig_rax
            registers.rip -= len(_INSTRUCTION)
            registers.orig_rax = _NO_CALL
        _set_registers(self._thread, registers)


@contextmanager
def _queried(process: Process) -> Iterator[_Tracee]:
    """Prepare a thread of a process for queries, and let it continue where it was."""
    memory = process.open("mem", os.O_RDWR)
    try:
        instruction, thread = _instruction(process, memory), _thread(process)
        lost: list[int] = []
        with suppress(OSError):
            status = _wait(thread, wait_s=0.0)  # the stop that is known already
            if status >> 16 != _EVENT_STOP:
                lost.append(os.WSTOPSIG(status))
        filtered = process.status().get("Seccomp", "0") != "0"
        ptrace.ptrace(ptrace.SETOPTIONS, thread, 0, _TRACE_SYSCALLS | (_SUSPEND_SECCOMP if filtered else 0))
        mask = ctypes.c_uint64()
        ptrace.ptrace(ptrace.GETSIGMASK, thread, ctypes.sizeof(mask), ctypes.addressof(mask))
        every = ctypes.c_uint64((1 << 64) - 1)
        tracee = _Tracee(thread, memory, instruction)
        ptrace.ptrace(ptrace.SETSIGMASK, thread, ctypes.sizeof(every), ctypes.addressof(every))
        try:
            yield tracee
        finally:
            tracee.restore()
            ptrace.ptrace(ptrace.SETSIGMASK, thread, ctypes.sizeof(mask), ctypes.addressof(mask))
            ptrace.ptrace(ptrace.SETOPTIONS, thread, 0, 0)
            for number in dict.fromkeys([*lost, *tracee.signals]):
                process.signal(number)
    finally:
        os.close(memory)


def _thread(process: Process) -> int:
    """Return a thread of a process that has not ended. Raises ``ProcessGoneError``."""
    for thread in process.living_threads():
        return thread
    raise ProcessGoneError(0, "it has ended", str(process.pid))


def _instruction(process: Process, memory: int) -> int:
    """Return the address of an instruction for system calls in the part that the kernel maps into each process."""
    for line in process.text_lines("maps"):
        if line.endswith("[vdso]"):
            first, _, last = line.split()[0].partition("-")
            offset = os.pread(memory, int(last, 16) - int(first, 16), int(first, 16)).find(_INSTRUCTION)
            if offset >= 0:
                return int(first, 16) + offset
    raise OSError(0, "it has unmapped the vDSO")


def _wait(thread: int, wait_s: float = _WAIT_S) -> int:
    """Wait for the next stop of a traced thread; return its status. Raises ``OSError``."""
    began = time.monotonic()
    while True:
        waited, status = os.waitpid(thread, _ANY_CHILD | os.WNOHANG)
        if waited:
            break
        waited_s = time.monotonic() - began
        if waited_s > wait_s:
            raise OSError(0, "it does not stop")
        time.sleep(0 if waited_s < _PAUSE_S else _PAUSE_S)
    if not os.WIFSTOPPED(status):
        raise ProcessGoneError(0, "it has ended", str(thread))
    return status


def _copy(registers: _Registers) -> _Registers:
    return _Registers.from_buffer_copy(registers)


def clear_death_signals(image: PrivateImage) -> None:
    """Remove the signals that threads of the first process get at the end of its parent (``PR_SET_PDEATHSIG``).

    CRIU restores that process as its own child and ends, so that the kernel would send the signal at once
    (``root_prepare_shared`` in ``criu/cr-restore.c`` warns of it). Its parent is the shepherd before the dump and after
    the restore: PID 1, with whose end the kernel kills all processes of the namespace. The signal can thus never be
    delivered. CRIU restores those of all other processes. Raises ``BadImage``.
    """
    root = next(image_records(image.fd, "pstree.img"), None)
    if root is None:
        raise BadImage("pstree.img: no process")
    for thread in dict.fromkeys([integer(root, _PID), *repeated(root, _THREADS)]):
        name = f"core-{thread}.img"
        data = image.read(name)
        rewritten = data[:_MAGICS] + b"".join(framed(_without_signal(body)) for body in bodies(data))
        if rewritten != data:
            image.replace(name, rewritten)


def _without_signal(core: bytes) -> bytes:
    entries = []
    for number, value, begin, end in spans(core):
        if number == _THREAD_CORE and isinstance(value, bytes):
            other_fields = b"".join(value[first:last] for field, _, first, last in spans(value) if field != _SIGNAL)
            entries.append(encoded(number, other_fields))
        else:
            entries.append(core[begin:end])
    return b"".join(entries)
