"""Processes with states that a restore would lose are found, and continue as if nothing had happened."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stalling import Stalling
from waiting import wait_until

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.criu import kernel_states
from slurm_affinode.checkpoint.criu.kernel_states import lost, repeat_waits
from slurm_affinode.suspension.job.process_tree import LinuxProcesses

pytestmark = [
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

HEAD = "import ctypes, os, select, signal, socket, sys, threading, time; prctl = ctypes.CDLL(None).prctl\n"


@contextmanager
def program(code: str) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    """Run a Python program that prints a line when it is ready."""
    argv = (sys.executable, "-c", HEAD + code)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            with Process(running.pid) as process:
                yield running, process
        finally:
            running.kill()


def read_states(process: Process) -> list[str | None]:
    """Return the state that ``lost`` finds in a process; empty if it has ended."""
    processes, states = LinuxProcesses(), list[str | None]()
    member = processes.read(process.pid)
    assert member is not None
    with processes.hold([member], lambda item: states.append(lost(item))):
        return states


APART = (
    "not (results := []) and not threading.Thread(target=lambda: (results.append(ctypes.CDLL(None).unshare({flag})), "
    "threading.Event().wait()), daemon=True).start() and not any(iter(lambda: bool(results), True)) and results == [0]"
)
"""A thread that no longer shares something with the others."""
STATES = {
    "PR_SET_MDWE": "prctl(65, 1, 0, 0, 0) == 0",
    "PR_SET_MEMORY_MERGE": "prctl(67, 1, 0, 0, 0) == 0",
    "PR_MCE_KILL": "prctl(33, 1, 0, 0, 0) == 0",
    "PR_SET_SYSCALL_USER_DISPATCH": "prctl(59, 1, 0, 0, ctypes.create_string_buffer(1)) == 0",
    "modify_ldt": "ctypes.CDLL(None).syscall(154, 1, (ctypes.c_uint * 4)(0, 0, 1, 0x51), 16) == 0",
    "PR_SET_TSC": "prctl(26, 2, 0, 0, 0) == 0",
    "CLONE_FILES": APART.format(flag=0x400),
    "CLONE_FS": APART.format(flag=0x200),
}


@pytest.mark.parametrize("name", STATES)
def test_state_that_is_lost_is_refused(name: str) -> None:
    """The text names the state."""
    code = f"ok = {STATES[name]}\nos.write(1, b'ready\\n' if ok else b'no\\n'); signal.pause()"
    with program(code) as (_, process):
        (state,) = read_states(process)
        assert state is not None
        assert f"({name})" in state


WAITS = {
    "sleep": "time.sleep(1.5); print('slept')",
    "poll": "print('polled', select.select([], [], [], 1))",
    "socket": "a, b = socket.socketpair(); threading.Timer(1, lambda: b.send(b'x')).start(); print('got', a.recv(1))",
    "futex": "one = threading.Event(); threading.Timer(1, one.set).start(); one.wait(); print('set')",
    "compute": "end = time.time() + 1\nwhile time.time() < end: sum(range(1000))\nprint('computed')",
    "signals": "signal.signal(10, lambda *_: print('signal')); signal.signal(5, signal.SIG_IGN); time.sleep(1)\n"
    "os.kill(os.getpid(), 10); os.kill(os.getpid(), 5)",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ordinary_process_is_not_disturbed(wait: str) -> None:
    """It completes the system call that the queries have interrupted, and has its signal mask and handlers."""
    code = "signal.pthread_sigmask(0, [12]); print('ready', flush=True)\n" + WAITS[wait]
    with program(f"{code}\nprint('end', flush=True)") as (running, process):
        for _ in range(20):
            read_states(process)
        # While it creates a thread, all its signals are blocked for a moment.
        signal_12 = f"{1 << 11:016x}"
        wait_until("its mask is its own", process.status, lambda status: status["SigBlk"] == signal_12)
        assert process.status()["TracerPid"] == "0"
        assert running.stdout is not None
        assert running.stdout.read().endswith("end\n")
        assert running.wait() == 0


def test_stopped_process_stays_stopped() -> None:
    """And continues where it was after SIGCONT."""
    with program("print('ready', flush=True); time.sleep(1); print('end', flush=True)") as (running, process):
        process.signal(signal.SIGSTOP)
        wait_until("it is stopped", lambda: process.stat().state == "T")
        read_states(process)
        wait_until("it is stopped again", lambda: process.stat().state == "T")
        process.signal(signal.SIGCONT)
        assert running.stdout is not None
        assert running.stdout.read() == "end\n"
        assert running.wait() == 0


def test_pending_stop_is_neither_lost_nor_an_obstacle() -> None:
    """A second SIGSTOP stays pending while the process is stopped."""
    with program("print('ready', flush=True); time.sleep(1); print('end', flush=True)") as (running, process):
        process.signal(signal.SIGSTOP)
        wait_until("it is stopped", lambda: process.stat().state == "T")
        process.signal(signal.SIGSTOP)
        assert read_states(process) == [None]
        wait_until("it is stopped again", lambda: process.stat().state == "T")
        assert int(process.status()["ShdPnd"], 16) >> (signal.SIGSTOP - 1) & 1
        process.signal(signal.SIGCONT)
        assert running.stdout is not None
        assert running.stdout.read() == "end\n"
        assert running.wait() == 0


def test_signals_during_a_query_are_delivered() -> None:
    """Also those that arrive at the moment of the stop."""
    code = "count = 0\ndef on(*_): global count; count += 1\nsignal.signal(10, on); print('ready', flush=True)\n"
    code += "while count < 30: time.sleep(0.01)\nos._exit(0)"
    with program(code) as (running, process):
        for _ in range(300):
            process.signal(signal.SIGUSR1)
            assert read_states(process) in ([None], [])
            if running.poll() is not None:
                break
        assert running.wait(timeout=240) == 0


def test_process_that_has_changed_its_vdso_is_refused() -> None:
    """A query there raises a signal each time; the search ends at the first one."""
    code = "line = next(one for one in open('/proc/self/maps') if '[vdso]' in one)\n"
    code += "first, last = (int(one, 16) for one in line.split()[0].split('-'))\n"
    code += "libc = ctypes.CDLL(None); libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n"
    code += "assert libc.mprotect(first, last - first, 1) == 0; os.write(1, b'ready\\n'); signal.pause()"
    with program(code) as (_, process), pytest.raises(OSError, match="stopped by signal 11"):
        read_states(process)


def test_filter_of_the_process_does_not_kill_it(tmp_path: Path) -> None:
    """Strict mode ends a process at any system call but four."""
    code = "os.write(1, b'ready\\n'); prctl(22, 1)\nwhile True: pass"
    with program(code) as (running, process):
        wait_until("it is in strict mode", lambda: process.status()["Seccomp"] == "1")
        read_states(process)
        assert running.poll() is None


def test_process_that_has_ended_is_skipped() -> None:
    with program("print('ready', flush=True); signal.pause()") as (running, process):
        running.kill()
        wait_until("it has ended", process.ended)
        read_states(process)


WAIT = """
from ctypes import byref, c_int, c_long, c_void_p
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = c_long
signal.signal(10, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {{12, 34}})
r, w = os.pipe()
entry, word, events = (c_int * 2)(r, select.POLLIN), c_int(0), ctypes.create_string_buffer(12)
epoll = select.epoll()
epoll.register(r, select.EPOLLIN)
near, far = socket.socketpair()
room = ctypes.create_string_buffer(1)
def limit(seconds): near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(c_long(seconds)) + bytes(8))
limit(60)
def span(seconds): return byref((c_long * 2)(int(seconds), int(seconds % 1 * 1e9)))
rest, signals = (c_long * 2)(), byref(c_long(1 << 33))
def at(clock, seconds): return span(time.clock_gettime(clock) + seconds)
def call(number, *arguments):
    result = libc.syscall(number, *(c_long(one) if isinstance(one, int) else one for one in arguments))
    print(result, ctypes.get_errno() if result < 0 else 0, flush=True)
def wait(): {wait}
thread = threading.Thread(target=wait)
thread.start()
print("ready", flush=True)
signal.sigwait({{12}})
os.write(w, b"x")
far.send(b"x")
word.value = 1
libc.syscall(202, byref(word), 1, 1)
signal.pthread_kill(thread.ident, 34)
thread.join()
"""
BITSET = "call(202, byref(word), 9, 0, {limit}, 0, 0xffffffff)"
"""FUTEX_WAIT_BITSET, as the C library uses it for semaphores, locks and conditions."""
WAITS_AGAIN = {
    "poll without a limit": (7, "call(7, entry, 1, -1)", "1 0"),
    "poll": (7, "call(7, entry, 1, 60_000)", "1 0"),
    "epoll_wait without a limit": (232, "call(232, epoll.fileno(), events, 1, -1)", "1 0"),
    "epoll_wait": (232, "call(232, epoll.fileno(), events, 1, 60_000)", "1 0"),
    "epoll_pwait": (281, "call(281, epoll.fileno(), events, 1, 60_000, byref(c_long(1 << 11 | 1 << 33)), 8)", "1 0"),
    "epoll_pwait2": (441, "call(441, epoll.fileno(), events, 1, span(60), c_void_p(), 8)", "1 0"),
    "sigtimedwait without a limit": (128, "call(128, signals, c_void_p(), c_void_p(), 8)", "34 0"),
    "sigtimedwait": (128, "call(128, signals, c_void_p(), span(60), 8)", "34 0"),
    "futex": (202, "call(202, byref(word), 0, 0, span(60))", "0 0"),
    "recvfrom": (45, "call(45, near.fileno(), room, 1, 0, c_void_p(), c_void_p())", "1 0"),
    "read of a socket": (0, "call(0, near.fileno(), room, 1)", "1 0"),
    "futex until a time": (202, BITSET.format(limit="at(time.CLOCK_MONOTONIC, 600)"), "0 0"),
    "nanosleep": (35, "call(35, span(2), rest)", "0 0"),
    "clock_nanosleep": (230, "call(230, time.CLOCK_MONOTONIC, 0, span(2), rest)", "0 0"),
    "nanosleep without the remaining time": (35, "call(35, span(2), c_void_p())", "0 0"),
}
BY_THE_LIBRARY = {
    "poll without a limit": (7, "libc.poll(entry, 1, -1)", "1"),
    "poll": (7, "libc.poll(entry, 1, 60_000)", "1"),
    "clock_nanosleep": (230, "libc.clock_nanosleep(time.CLOCK_MONOTONIC, 0, span(2), rest)", "0"),
}
LEFT_TO_THE_KERNEL = {
    "poll": (7, "call(7, entry, 1, 61_000)"),
    "futex": (202, "call(202, byref(word), 0, 0, span(61))"),
    "recvfrom": (45, "limit(61); call(45, near.fileno(), room, 1, 0, c_void_p(), c_void_p())"),
    "clock_nanosleep until a time": (230, "call(230, time.CLOCK_MONOTONIC, 1, at(time.CLOCK_MONOTONIC, 600), rest)"),
    "nanosleep": (35, "call(35, span(61), c_void_p())"),
    "select": (23, "call(23, r + 1, byref(c_long(1 << r)), c_void_p(), c_void_p(), c_void_p())"),
}


def after_repeat(process: Process) -> list[tuple[int, int]]:
    """Stop a process, repeat its waits; return result and number of the call of each thread, and resume."""
    processes, calls = LinuxProcesses(), list[tuple[int, int]]()
    member = processes.read(process.pid)
    assert member is not None

    def examine(held: Process) -> None:
        repeat_waits(held)
        for thread in held.threads():
            registers = kernel_states._registers(thread)
            calls.append((ctypes.c_int64(registers.rax).value, ctypes.c_int64(registers.orig_rax).value))

    processes.stop([member])
    wait_until("it stops", lambda: process.stat().state, lambda state: state == "T")
    with processes.hold([member], examine):
        pass
    processes.resume([member])
    return calls


def stop_and_continue(running: subprocess.Popen[str], process: Process) -> None:
    """Interrupt its system calls."""
    running.send_signal(signal.SIGSTOP)
    wait_until("it stops", lambda: process.stat().state, lambda state: state == "T")
    running.send_signal(signal.SIGCONT)
    wait_until("it runs", lambda: process.stat().state, lambda state: state == "S")


@contextmanager
def waiting(number: int, wait: str) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    """Run a program with a thread that waits in a system call."""
    with program(WAIT.format(wait=wait)) as (running, process):

        def calls() -> list[str]:
            return [process.text(f"task/{thread}/syscall").split()[0] for thread in process.threads()]

        wait_until("a thread waits", calls, lambda numbers: str(number) in numbers[1:])
        yield running, process


def last_line(running: subprocess.Popen[str]) -> str:
    """End the wait of the program; return the result of its call and the number of its error."""
    assert running.stdout is not None
    running.send_signal(12)
    return running.stdout.readline().strip()


@pytest.mark.parametrize("name", WAITS_AGAIN)
def test_wait_begins_again(name: str) -> None:
    """For CRIU, the thread is then in no system call."""
    number, wait, expected = WAITS_AGAIN[name]
    with waiting(number, wait) as (running, process):
        for _ in range(3):
            assert after_repeat(process)[1] == (number, -1)
        assert last_line(running) == expected


@pytest.mark.parametrize("name", BY_THE_LIBRARY)
def test_wait_that_the_kernel_has_repeated_begins_again(name: str) -> None:
    """The kernel repeats it by restart_syscall(2) after an earlier stop."""
    number, wait, expected = BY_THE_LIBRARY[name]
    with waiting(number, f"print({wait}, flush=True)") as (running, process):
        stop_and_continue(running, process)
        assert after_repeat(process)[1] == (number, -1)
        assert last_line(running) == expected


@pytest.mark.parametrize("name", LEFT_TO_THE_KERNEL)
def test_other_wait_is_left_to_the_kernel(name: str) -> None:
    """It would last much longer, or does not depend on it."""
    number, wait = LEFT_TO_THE_KERNEL[name]
    with waiting(number, wait) as (_, process):
        result, call = after_repeat(process)[1]
        assert call == number
        assert result in (-4, -512, -513, -514, -516)


def test_file_in_place_of_the_socket_of_a_call_is_not_opened(
    stalling: Callable[[Path], Stalling], tmp_path: Path
) -> None:
    """If its file system did not respond, to close it would block the agent, with the job stopped."""
    file_system = stalling(tmp_path / "mounted")
    path = file_system.path / "file"
    path.touch()
    replace = f"os.dup2(os.open({str(path)!r}, os.O_RDONLY), near.fileno())"
    wait = f"threading.Timer(0.1, lambda: {replace}).start(); call(0, near.fileno(), room, 1)"
    calls: list[list[tuple[int, int]]] = []
    with waiting(0, wait) as (_, process):

        def files() -> list[str]:
            return [process.link(f"fd/{name}") for name in process.names("fd")]

        wait_until("the socket is replaced", files, lambda names: names.count(str(path)) == 2)
        file_system.stall()
        try:
            threading.Thread(target=lambda: calls.append(after_repeat(process)), daemon=True).start()
            wait_until("the process is examined", lambda: calls)
            assert file_system.program.poll() is None, "it was killed, which ends blocked calls"
        finally:
            file_system.resume()
    assert (-errno.EINTR, 0) in calls[0]


def test_sleep_is_not_extended() -> None:
    """It continues with the remaining time, however often it is stopped."""
    wait = "call(35, span(1), rest); print(rest[0], rest[1] > 0, flush=True)"
    with waiting(35, wait) as (running, process):
        for _ in range(3):
            assert after_repeat(process)[1] == (35, -1)
        assert last_line(running) == "0 0"
        assert running.stdout is not None
        assert running.stdout.readline() == "0 True\n"


@pytest.mark.parametrize("name", ["poll without a limit", "epoll_wait"])
def test_wait_before_a_handler_is_left_to_the_kernel(name: str) -> None:
    """The program may depend on EINTR."""
    number, wait, _ = WAITS_AGAIN[name]
    with waiting(number, wait) as (running, process):
        running.send_signal(signal.SIGSTOP)
        wait_until("it stops", lambda: process.stat().state, lambda state: state == "T")
        running.send_signal(10)
        assert (number, -1) not in after_repeat(process)


@pytest.mark.parametrize("address", [0x1008, 1 << 63, (1 << 64) - 1])
def test_time_limit_at_any_address_is_read_or_an_error_of_the_system(tmp_path: Path, address: int) -> None:
    """The process has chosen the address, and may have unmapped its end since the call began."""
    path = tmp_path / "mem"
    path.write_bytes(bytes(0x1010 - 8) + b"12345678")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert kernel_states._time_limit(0x1000, fd, milliseconds=False) is not None
        with pytest.raises(OSError, match="Bad address"):
            kernel_states._time_limit(address, fd, milliseconds=False)
    finally:
        os.close(fd)
