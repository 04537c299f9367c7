"""The only module that runs other programs: without a shell, always with a timeout, with standard error kept."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.text import last_line

_MOST_FILES = 65536
REAP_S = 5.0
"""Time for a killed program to end."""
PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Directories with programs that root runs for others, regardless of ``PATH``."""
SLURM_COMMANDS = ("sacct", "scontrol", "squeue", "scancel")
"""Slurm's commands that this package runs."""
_MOST_LINKS = 40
_by: Callable[..., Completed] | None = None


def run_by(runner: Callable[..., Completed] | None) -> None:
    """Let ``runner`` execute ``run`` from now on, unless it raises ``OSError``; ``None``: this process does."""
    global _by  # noqa: PLW0603 - the one switch for all programs
    _by = runner


def search_first(directory: Path | None) -> None:
    """Search for programs in ``directory`` before ``PATH``, also in processes started by this one."""
    places = os.environ.get("PATH", os.defpath)
    if directory is not None and places.partition(":")[0] != str(directory):
        os.environ["PATH"] = f"{directory}:{places}"


@dataclass(frozen=True, slots=True)
class Completed:
    """Result of a program: exit status, standard output as bytes, standard error as text."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: str


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    stdin: bytes | None = None,
    pass_fds: Collection[int] = (),
    group: bool = False,
) -> Completed:
    """Run ``argv`` and return its output.

    ``pass_fds``: descriptors that it inherits, with their numbers. ``group``: it leads a session of its own, and on
    timeout its process group is killed (otherwise only the program itself).

    Raises ``UnreachableError`` if the program cannot be started, runs longer than ``timeout_s`` seconds or, with
    ``check``, ends with a status other than 0; the message contains the last line that it wrote to standard error.
    """
    if _by is not None:
        with contextlib.suppress(OSError):  # the runner has ended
            return _by(argv, timeout_s=timeout_s, env=env, check=check, stdin=stdin, pass_fds=pass_fds, group=group)
    name = argv[0]
    try:
        completion = _communicate(argv, stdin or b"", timeout_s, env=env, pass_fds=pass_fds, group=group)
    except FileNotFoundError as error:
        hint = f"install the package that contains {name}, or put it on PATH"
        if name in (*SLURM_COMMANDS, "sacctmgr"):
            hint = f"set slurm.bin_dir in the configuration to the directory that has {name}"
        raise UnreachableError(f"{name}: no such program", hint=hint) from error
    except PermissionError as error:
        raise UnreachableError(f"{name}: not allowed to run it") from error
    except OSError as error:  # not a program, too many arguments, process limit
        raise UnreachableError(f"{name}: cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{name}: timed out after {timeout_s:g} s") from error
    stderr = completion.stderr.decode("utf-8", "backslashreplace")
    if check and completion.returncode != 0:
        raise UnreachableError(f"{name} ended with status {completion.returncode}: {last_line(stderr) or 'no output'}")
    return Completed(tuple(argv), completion.returncode, completion.stdout, stderr)


def find(name: str) -> str:
    """Return the path of a program that only root and this process's own user can replace.

    ``name``: an absolute path, or the name of a file in one of ``PLACES``. Raises ``UnreachableError``.
    """
    paths = [Path(name)] if name.startswith("/") else [Path(place) / name for place in PLACES]
    for path in paths:
        with contextlib.suppress(OSError):
            program = path.resolve(strict=True)
            _refuse_others(path)
            return str(program)
    raise UnreachableError(f"{name}: no such program", hint=f"install the package that contains {name}")


def _refuse_others(path: Path) -> None:
    """Raise ``UnreachableError`` if another user can replace a program. ``OSError``: see ``replaceable``."""
    target = replaceable(path)
    if target is not None:
        raise UnreachableError(
            f"{path}: users other than root may write to {target}",
            hint="root runs only programs that no other user can change",
        )


def replaceable(path: Path) -> Path | None:
    """Return the first part of a path that users other than root and this process's own can change, or ``None``.

    Parts are the file, and the directories and links on the way to it. ``path`` is absolute. Raises ``OSError`` if it
    leads nowhere.
    """
    position, rest, links = Path("/"), [*reversed(path.parts[1:]), "/"], 0
    while rest:
        part = rest.pop()
        position = position.parent if part == ".." else position / part
        facts = position.lstat()
        link = stat.S_ISLNK(facts.st_mode)
        # In a sticky directory, other users cannot replace files of root.
        sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
        if facts.st_uid not in (0, os.geteuid()) or (facts.st_mode & 0o022 and not link and not sticky):
            return position
        if link:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = position.readlink()
            position = Path("/") if target.is_absolute() else position.parent
            rest += [component for component in reversed(target.parts) if component != "/"]
    return None


def _program(name: str, env: Mapping[str, str] | None) -> str:
    """Return the file to execute for ``name``. For root, only a program that no other user can replace.

    Raises ``UnreachableError``, ``FileNotFoundError``.
    """
    if os.geteuid() != 0 or "/" in name:
        return name
    refused: UnreachableError | PermissionError | None = None
    for place in os.get_exec_path(env):
        path = Path(place) / name
        if not path.is_absolute() or not path.is_file():
            continue
        if not os.access(path, os.X_OK):
            refused = refused or PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            continue
        try:
            _refuse_others(path)
        except UnreachableError as error:
            refused = refused or error
        except OSError:  # deleted meanwhile
            continue
        else:
            return str(path)
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def raise_file_limit() -> None:
    """Raise the limit of open files to thousands, also for child processes: a restored program may map as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MOST_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MOST_FILES), hard))


def of_module(name: str, *arguments: str) -> list[str]:
    """Return the ``argv`` of a module of this package that is run as a program.

    Nothing is imported from the current directory (``-P``): any user may own it, and this process may be root.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


class ChildEndedError(Exception):
    """A child ended, or had to be killed, during a request; the text says how, in one line."""


class Helper(Protocol):
    """A running program that answers requests (``Child``, or a fake in tests)."""

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        """See ``Child.ask``."""
        ...

    def close(self) -> None:
        """End the program."""
        ...


class Child:
    """A running program that answers lines on its standard input with lines on its standard output.

    One request at a time. It is killed (SIGKILL) if a response does not arrive in time, and by ``close``; it should end
    when its standard input is closed.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, pass_fds: Collection[int] = ()
    ) -> None:
        """Start ``argv``; ``pass_fds`` as for ``run``. Raises ``UnreachableError`` if it cannot be started."""
        # A file, not a pipe: it is not read while the child runs, and a full pipe would block the child.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._rest = b""
        try:
            self._process = subprocess.Popen(  # noqa: S603 - argv is a list that our own code builds; there is no shell
                list(argv),
                executable=_program(argv[0], env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=None if env is None else dict(env),
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # terminal interrupts are passed on by this process
            )
        except OSError as error:
            self._stderr.close()
            raise UnreachableError(f"{argv[0]}: cannot be started: {error.strerror}") from error
        # Optional in Popen, but always pipes here.
        self._questions, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    @property
    def pid(self) -> int:
        """Its PID."""
        return self._process.pid

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        """Send ``line`` and return the response line, both without the newline.

        Raises ``ChildEndedError`` if there is no response after ``timeout_s`` seconds, or if the child has ended. It is
        no longer running then.
        """
        deadline = time.monotonic() + timeout_s
        os.ftruncate(self._stderr.fileno(), 0)
        try:
            self._questions.write(line + b"\n")
            self._questions.flush()
        except OSError:
            raise ChildEndedError(self._end("ended")) from None
        chunks = [self._rest]
        descriptor = self._answers.fileno()
        poll = select.poll()  # select(2) takes no descriptor above 1023
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in chunks[-1]:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ChildEndedError(self._end(f"gave timed out after {timeout_s:g} s", kill=True))
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise ChildEndedError(self._end("ended"))
            chunks.append(chunk)
        answer, _, self._rest = b"".join(chunks).partition(b"\n")
        return answer

    def _end(self, reason: str, *, kill: bool = False) -> str:
        status = self._finish(kill)
        if not kill:
            reason = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), 4096, max(0, size - 4096)).decode("utf-8", "backslashreplace")
        last = last_line(tail)
        self.close()
        return f"{reason}: {last}" if last else reason

    def _finish(self, kill: bool) -> int:
        if kill:
            self._process.kill()
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:  # blocked in a driver call that does not return; nothing more can be done
            return -signal.SIGKILL

    def close(self) -> None:
        """Close its standard input, and kill it if it does not end within five seconds."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._finish(kill=False)
        self._stderr.close()


def _communicate(
    argv: Sequence[str],
    stdin: bytes,
    timeout_s: float,
    *,
    env: Mapping[str, str] | None,
    pass_fds: Collection[int],
    group: bool,
) -> subprocess.CompletedProcess[bytes]:
    process = subprocess.Popen(  # noqa: S603 - argv is a list that our own code builds; there is no shell
        list(argv),
        executable=_program(argv[0], env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if env is None else dict(env),
        pass_fds=tuple(pass_fds),
        start_new_session=group,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
    except BaseException:
        # Not permitted: it has become another user, and this process has no CAP_KILL.
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(PermissionError):
            process.kill()
        _leave(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Reap a killed program, without waiting forever for one that is blocked in the kernel (a file server is gone)."""
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
