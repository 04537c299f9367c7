"""A restored tree is held until it was looked at."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import gate
from slurm_affinode.checkpoint.gate import Gate, work_directory
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.errors import UnreachableError

PRE_RESUME = {"CRTOOLS_SCRIPT_ACTION": "pre-resume", "PATH": os.environ["PATH"]}


def opening(directory: Path, restored: Callable[[], None], resuming: Callable[[], None] = lambda: None) -> Gate:
    """A gate with these two calls."""
    return Gate(directory, restored=restored, resuming=resuming)


def criu_runs_it(directory: Path, action: str) -> int:
    """As CRIU runs scripts: in its work directory, no descriptors, what it is about in the environment."""
    program = Gate.OPTION.partition("=")[2]
    return subprocess.run(
        [program], cwd=directory, env={"CRTOOLS_SCRIPT_ACTION": action}, timeout=30, check=False
    ).returncode


def test_tree_is_verified_as_root_and_looked_at_before_it_runs(tmp_path: Path) -> None:
    """Scripts end when the calls are over; for other actions they do nothing."""
    calls: list[str] = []
    with opening(tmp_path, lambda: calls.append("restored"), lambda: calls.append("resuming")) as gate:
        assert criu_runs_it(tmp_path, "post-setup-namespaces") == 0
        assert calls == []
        assert criu_runs_it(tmp_path, "post-restore") == 0
        assert calls == ["restored"]
        assert criu_runs_it(tmp_path, "pre-resume") == 0
        assert calls == ["restored", "resuming"]
    gate.check_asked()


def test_criu_gives_up_where_the_tree_is_refused(tmp_path: Path) -> None:
    """By the script's status, which counts at this point; nothing is looked at afterwards."""
    calls: list[str] = []

    def refuse() -> None:
        raise RestoreFailed("damaged")

    def criu() -> None:
        with opening(tmp_path, refuse, lambda: calls.append("resuming")):
            assert criu_runs_it(tmp_path, "post-restore") == 1
            assert criu_runs_it(tmp_path, "pre-resume") == 1

    with pytest.raises(RestoreFailed, match="damaged"):
        criu()
    assert calls == []


def test_the_look_comes_also_where_an_agent_has_much_open(tmp_path: Path) -> None:
    """More than select(2) can count to."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    many = [os.open("/", os.O_PATH) for _ in range(1030)]
    looks: list[str] = []
    try:
        with opening(tmp_path, lambda: looks.append("look")):
            assert criu_runs_it(tmp_path, "post-restore") == 0
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert looks == ["look"]


@pytest.mark.parametrize("error", [None, UnreachableError("no answer")])
def test_what_the_look_raises_is_what_is_said(tmp_path: Path, error: Exception | None) -> None:
    """Whatever CRIU came to, which was killed meanwhile."""

    def refuse() -> None:
        raise RestoreFailed("strange")

    def criu() -> None:
        with opening(tmp_path, lambda: None, refuse):
            criu_runs_it(tmp_path, "post-restore")
            criu_runs_it(tmp_path, "pre-resume")
            if error is not None:
                raise error

    with pytest.raises(RestoreFailed, match="strange"):
        criu()


@pytest.mark.parametrize("asked", [(), ("post-restore",), ("pre-resume",)])
def test_tree_that_was_resumed_without_asking_is_a_failure(tmp_path: Path, asked: tuple[str, ...]) -> None:
    """CRIU goes on where its script cannot be run."""
    with opening(tmp_path, lambda: None) as gate:
        for action in asked:
            criu_runs_it(tmp_path, action)
    with pytest.raises(RestoreFailed, match="without asking"):
        gate.check_asked()


def test_a_tree_stays_where_it_is_when_the_agent_dies(tmp_path: Path) -> None:
    """CRIU would let it go when the script ends, however that ends."""
    with opening(tmp_path, lambda: None):
        script = (tmp_path / "gate").read_text()
    for name in ("ask", "go"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    agents = os.open(tmp_path / "go", os.O_RDWR)
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, env=PRE_RESUME) as held:
        (tmp_path / "ask").read_bytes()
        os.close(agents)
        with (tmp_path / "go").open("wb") as another:  # opens when somebody reads at the other end
            assert held.poll() is None
            another.write(b"0\n")
        assert held.wait(30) == 0


def test_a_work_directory_goes_again() -> None:
    """Root alone gets at it."""
    with work_directory() as (path, fd):
        assert os.path.samestat(path.stat(), os.fstat(fd))
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_what_a_killed_agent_has_left_goes_with_the_next_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what another restore, or a CRIU that has outlived its agent, works in."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = """
import os, sys
from slurm_affinode.checkpoint.gate import work_directory
with work_directory() as (path, fd):
    (path / "gate").write_text("")
    print(path, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), 9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as agent:  # fmt: skip
        assert agent.stdout is not None
        theirs = Path(agent.stdout.readline().strip())
        (tmp_path / theirs.name.replace("-restore-", "-other-")).mkdir()
        with work_directory() as (mine, _), work_directory() as (another, _):
            assert {theirs, mine, another} <= set(tmp_path.iterdir())
        agent.communicate(timeout=30)
    assert theirs.exists()
    with work_directory() as (mine, _):
        assert len(set(tmp_path.iterdir()) - {mine}) == 1
        assert not theirs.exists()


def test_a_work_directory_that_another_sweeps_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent and a restore by hand may begin in the same moment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, swept = fcntl.flock, []

    def too_late(fd: int, how: int) -> None:
        if not swept:
            swept.append(Path(f"/proc/self/fd/{fd}").readlink())
            swept[0].rmdir()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with work_directory() as (path, fd):
        assert path != swept[0]
        assert os.path.samestat(path.stat(), os.fstat(fd))
    assert not list(tmp_path.iterdir())


def test_it_is_where_programs_can_be_written_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites mount what everybody may write to without programs, and some of the rest read-only."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    places = [tmp_path / name for name in ("noexec", "ro", "missing", "good")]
    monkeypatch.setattr(tempfile, "tempdir", str(places[0]))
    monkeypatch.setattr(gate, "_PLACES", [str(place) for place in places[1:]])
    mounted = []
    places[3].mkdir()
    try:
        for place in places[:2]:
            place.mkdir()
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", place.name, "tmpfs", place], check=False)
            if done.returncode:
                pytest.skip("no tmpfs can be mounted")
            mounted.append(place)
        with work_directory() as (work, _):
            assert work.parent == places[3]
            with opening(work, lambda: None):
                assert criu_runs_it(work, "pre-resume") == 0
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", place], check=False)
