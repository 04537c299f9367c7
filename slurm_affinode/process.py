"""The only place that runs another program: no shell, a timeout always, standard error kept."""

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
from typing import IO, cast

from slurm_affinode.errors import UnreachableError

_MOST_FILES = 65536
REAP_S = 5.0
"""A program that was killed has so long to end."""
PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Where programs that root runs for others are looked for, whatever ``PATH`` says."""
SLURM_COMMANDS = ("sacct", "scontrol", "squeue", "scancel")
"""What this package runs of Slurm's own."""
_MOST_LINKS = 40
_by: Callable[..., Completed] | None = None


def run_by(runner: Callable[..., Completed] | None) -> None:
    """Have ``runner`` do what ``run`` does, from now on; ``None``: this process does it. ``OSError``: it cannot."""
    global _by  # noqa: PLW0603 - whoever runs programs has this one way to do so
    _by = runner


def search_first(directory: Path | None) -> None:
    """Have programs looked for in ``directory`` before those of ``PATH``, also by the processes that we start."""
    places = os.environ.get("PATH", os.defpath)
    if directory is not None and places.partition(":")[0] != str(directory):
        os.environ["PATH"] = f"{directory}:{places}"


@dataclass(frozen=True, slots=True)
class Completed:
    """What a program left behind: exit status, standard output as bytes, standard error as text."""

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

    ``pass_fds``: descriptors that it inherits, under their numbers. ``group``: it leads a session of its own, and what
    it started ends with it at the time-out (else only the program itself does).

    Raises ``UnreachableError`` where the program cannot be started, runs past ``timeout_s`` seconds or, with ``check``,
    ends with a status other than 0; the message carries the last line that the program wrote on standard error.
    """
    if _by is not None:
        with contextlib.suppress(OSError):  # it has ended
            return _by(argv, timeout_s=timeout_s, env=env, check=check, stdin=stdin, pass_fds=pass_fds, group=group)
    name = argv[0]
    try:
        done = _communicate(argv, stdin or b"", timeout_s, env=env, pass_fds=pass_fds, group=group)
    except FileNotFoundError as error:
        hint = f"install the package that has {name}, or put it on PATH"
        if name in (*SLURM_COMMANDS, "sacctmgr"):
            hint = f"set slurm.bin_dir in the configuration to the directory that has {name}"
        raise UnreachableError(f"{name}: no such program", hint=hint) from error
    except PermissionError as error:
        raise UnreachableError(f"{name}: not allowed to run it") from error
    except OSError as error:  # not a program, too many arguments, no process left
        raise UnreachableError(f"{name}: cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{name}: no answer within {timeout_s:g} s") from error
    stderr = done.stderr.decode("utf-8", "backslashreplace")
    if check and done.returncode != 0:
        lines = [line for line in stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "it said nothing"
        raise UnreachableError(f"{name} ended with status {done.returncode}: {said}")
    return Completed(tuple(argv), done.returncode, done.stdout, stderr)


def find(name: str) -> str:
    """The path of a program that nobody but root, and this process's own user, can have put there.

    ``name``: an absolute path, or the name of a file in one of ``PLACES``. Raises ``UnreachableError``.
    """
    paths = [Path(name)] if name.startswith("/") else [Path(place) / name for place in PLACES]
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.resolve(strict=True)
            _refuse_others(path)
            return str(found)
    raise UnreachableError(f"{name}: no such program", hint=f"install the package that has {name}")


def _refuse_others(path: Path) -> None:
    """Raises ``UnreachableError`` where somebody else may replace a program. ``OSError``: see ``replaceable``."""
    at = replaceable(path)
    if at is not None:
        raise UnreachableError(
            f"{path}: others than root may write to {at}", hint="root runs only programs that are root's alone"
        )


def replaceable(path: Path) -> Path | None:
    """The first of a file and the directories and links on the way to it that others than root, and this process's own
    user, may change; ``None``: there is none. ``path`` is absolute. Raises ``OSError`` where it leads nowhere.
    """
    at, rest, links = Path("/"), [*reversed(path.parts[1:]), "/"], 0
    while rest:
        part = rest.pop()
        at = at.parent if part == ".." else at / part
        facts = at.lstat()
        link = stat.S_ISLNK(facts.st_mode)
        # In a sticky directory nobody replaces what belongs to root.
        sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
        if facts.st_uid not in (0, os.geteuid()) or (facts.st_mode & 0o022 and not link and not sticky):
            return at
        if link:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = at.readlink()
            at = Path("/") if target.is_absolute() else at.parent
            rest += [one for one in reversed(target.parts) if one != "/"]
    return None


def _program(name: str, env: Mapping[str, str] | None) -> str:
    """What to execute for ``name``. For root only a program that nobody else can replace; ``PATH`` may name others.

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
        except OSError:  # it was there a moment ago
            continue
        else:
            return str(path)
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def raise_file_limit() -> None:
    """Let this process, and what it starts, have thousands of files open: as many as a restored program has mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MOST_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MOST_FILES), hard))


def of_module(name: str, *arguments: str) -> list[str]:
    """The ``argv`` of a module of ours that is a program of its own.

    Nothing is imported from the directory in which we were started (``-P``): it may be anybody's, and we may be root.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


class ChildEndedError(Exception):
    """A child ended, or had to be ended, in the middle of a question; the text says how, in one line."""


class Child:
    """A program that runs on and answers lines on its standard output with lines on its standard input.

    One question at a time. It is ended (SIGKILL) where an answer does not come in time, and by ``close``; it should
    end by itself where its standard input does.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, pass_fds: Collection[int] = ()
    ) -> None:
        """Start ``argv``; ``pass_fds`` as of ``run``. Raises ``UnreachableError`` where it cannot be started."""
        # A file and not a pipe: nobody reads it while the child runs, and a full pipe would stop the child.
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
                start_new_session=True,  # an interrupt at the terminal is for us to pass on
            )
        except OSError as error:
            self._stderr.close()
            raise UnreachableError(f"{argv[0]}: cannot be started: {error.strerror}") from error
        # Popen has them optional: these two are pipes.
        self._questions, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        """Send ``line`` and return the line that comes back, both without the newline.

        Raises ``ChildEndedError``: there is no answer after ``timeout_s`` seconds, or the child has ended. It does not
        run any more then.
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
        look = select.poll()  # select(2) takes no descriptor above 1023
        look.register(descriptor, select.POLLIN)
        while b"\n" not in chunks[-1]:
            if not look.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ChildEndedError(self._end(f"gave no answer within {timeout_s:g} s", kill=True))
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise ChildEndedError(self._end("ended"))
            chunks.append(chunk)
        answer, _, self._rest = b"".join(chunks).partition(b"\n")
        return answer

    def _end(self, how: str, *, kill: bool = False) -> str:
        status = self._finish(kill)
        if not kill:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), 4096, max(0, size - 4096)).decode("utf-8", "backslashreplace")
        said = [line.strip("\0 \t") for line in tail.splitlines() if line.strip("\0 \t")]
        self.close()
        return f"{how}: {said[-1]}" if said else how

    def _finish(self, kill: bool) -> int:
        if kill:
            self._process.kill()
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:  # it is inside of a driver that does not return; nothing more can be done
            return -signal.SIGKILL

    def close(self) -> None:
        """End it: close its standard input, and kill it where it does not go within five seconds."""
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
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        _leave(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _leave(process: subprocess.Popen[bytes]) -> None:
    """One that was killed: it is waited for, but one that hangs in the kernel (a file server that is gone) for ever."""
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
