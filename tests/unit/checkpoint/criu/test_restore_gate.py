"""The restore gate: a restored tree is held until it was verified and compared."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.checkpoint.criu import restore_gate
from slurm_affinode.checkpoint.criu.restore_gate import Credentials, Gate
from slurm_affinode.checkpoint.image.criu_images import BadImage
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.checkpoint.work_directory import work_directory

from ..criu_files import Field, image, message

PRE_RESUME = {"CRTOOLS_SCRIPT_ACTION": "pre-resume", "PATH": os.environ["PATH"]}


def opening(directory: Path, restored: Callable[[], None], resuming: Callable[[], None] = lambda: None) -> Gate:
    """Return a gate with these two calls."""
    return Gate(directory, restored=restored, resuming=resuming)


def criu_runs_it(directory: Path, action: str) -> int:
    """Run the script as CRIU does: in its work directory, without descriptors, with the action in the environment."""
    program = Gate.OPTION.partition("=")[2]
    return subprocess.run(
        [program], cwd=directory, env={"CRTOOLS_SCRIPT_ACTION": action}, timeout=240, check=False
    ).returncode


def test_tree_is_verified_and_compared_before_it_runs(tmp_path: Path) -> None:
    """Each script ends after its call; for other actions it does nothing."""
    calls: list[str] = []
    with opening(tmp_path, lambda: calls.append("restored"), lambda: calls.append("resuming")) as gate:
        assert criu_runs_it(tmp_path, "post-setup-namespaces") == 0
        assert calls == []
        assert criu_runs_it(tmp_path, "post-restore") == 0
        assert calls == ["restored"]
        assert criu_runs_it(tmp_path, "pre-resume") == 0
        assert calls == ["restored", "resuming"]
    gate.check_actions()


def test_criu_aborts_when_the_tree_is_refused(tmp_path: Path) -> None:
    """CRIU obeys the status of the script at this point; nothing is compared afterwards."""
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


def test_gate_works_with_many_open_files(tmp_path: Path) -> None:
    """There are more than select(2) supports."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    many = [os.open("/", os.O_PATH) for _ in range(1030)]
    checks: list[str] = []
    try:
        with opening(tmp_path, lambda: checks.append("look")):
            assert criu_runs_it(tmp_path, "post-restore") == 0
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert checks == ["look"]


@pytest.mark.parametrize("error", [None, UnreachableError("no answer")])
def test_error_of_a_call_is_raised(tmp_path: Path, error: Exception | None) -> None:
    """It precedes the error of CRIU, which was killed meanwhile."""

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


@pytest.mark.parametrize("actions", [(), ("post-restore",), ("pre-resume",)])
def test_tree_resumed_without_the_script_is_a_failure(tmp_path: Path, actions: tuple[str, ...]) -> None:
    """CRIU continues if its script cannot be run."""
    with opening(tmp_path, lambda: None) as gate:
        for action in actions:
            criu_runs_it(tmp_path, action)
    with pytest.raises(RestoreFailed, match="without running its script"):
        gate.check_actions()


def test_tree_is_held_when_the_agent_dies(tmp_path: Path) -> None:
    """CRIU would release it when the script ends, for whatever reason."""
    with opening(tmp_path, lambda: None):
        script = (tmp_path / "gate").read_text()
    for name in ("ask", "go"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    agents = os.open(tmp_path / "go", os.O_RDWR)
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, env=PRE_RESUME) as held:
        (tmp_path / "ask").read_bytes()
        os.close(agents)
        with (tmp_path / "go").open("wb") as another:  # opens when the other end is open for reading
            assert held.poll() is None
            another.write(b"0\n")
        assert held.wait(30) == 0


def test_work_directory_is_removed() -> None:
    """Only root has access."""
    with work_directory() as (path, fd):
        assert os.path.samestat(path.stat(), os.fstat(fd))
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_work_directory_of_a_killed_agent_is_removed_by_the_next_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories of a running restore, or of a CRIU that has outlived its agent, stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = """
import os, sys
from slurm_affinode.checkpoint.work_directory import work_directory
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
        stale = Path(agent.stdout.readline().strip())
        (tmp_path / stale.name.replace("-restore-", "-other-")).mkdir()
        with work_directory() as (current, _), work_directory() as (another, _):
            assert {stale, current, another} <= set(tmp_path.iterdir())
        agent.communicate(timeout=240)
    assert stale.exists()
    with work_directory() as (current, _):
        assert len(set(tmp_path.iterdir()) - {current}) == 1
        assert not stale.exists()


def test_work_directory_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent and a manual restore may begin at the same moment."""
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


def test_work_directory_is_writable_and_allows_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites mount directories that all users can write to with noexec, and others read-only."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    places = [tmp_path / name for name in ("noexec", "ro", "missing", "good")]
    monkeypatch.setattr(tempfile, "tempdir", str(places[0]))
    monkeypatch.setattr("slurm_affinode.checkpoint.work_directory._PLACES", [str(place) for place in places[1:]])
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


def test_filter_of_all_threads_is_recorded_with_the_main_thread(tmp_path: Path) -> None:
    """CRIU leaves it out of the other threads; a main thread without a filter is not restored where one is needed."""
    numbers = [(field, 0) for field in (*range(1, 9), 13, 14)]
    for number, task, seccomp in ((2, True, 2), (3, False, None), (4, True, None)):
        thread = message((10, message(*numbers)), *([] if seccomp is None else [(11, seccomp)]))
        fields: list[Field] = [(1, 1), (5, thread), *([(3, message((1, 1)))] if task else [])]
        (tmp_path / f"core-{number}.img").write_bytes(image(message(*fields)))
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        leader, thread, unfiltered = (restore_gate.of_image(directory, number) for number in (2, 3, 4))
    finally:
        os.close(directory)
    assert leader is not None
    assert thread is not None
    assert unfiltered is not None
    assert restore_gate.excess(thread, leader) is None
    assert "seccomp" in str(restore_gate.excess(unfiltered, leader))


CREDENTIALS = Credentials(
    frozenset({2001}), frozenset({2001}), frozenset({4, 6}), dict.fromkeys(("CapEff", "CapBnd"), 0b110), True, 2
)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"uids": frozenset({0, 2001})}, "user IDs 0, 2001"),
        ({"uids": frozenset({2002})}, "user IDs 2002"),
        ({"gids": frozenset({0, 2001})}, "group ID 0,"),
        ({"groups": frozenset({4, 27})}, "group 27,"),
        ({"capabilities": {"CapEff": 0b1000}}, r"CapEff 0x8\)"),
        ({"capabilities": {"CapBnd": 0b111}}, r"CapBnd 0x1\)"),
        ({"capabilities": {"CapAmb": 0b10}}, r"CapAmb 0x2\)"),
        ({"no_new_privs": False}, "no_new_privs"),
        ({"seccomp": 0}, "seccomp"),
        ({"securebits": 1 << 2}, "securebits 0x4"),
    ],
)
def test_each_right_beyond_those_of_the_attempt_is_refused(change: dict[str, Any], why: str) -> None:
    assert restore_gate.excess(CREDENTIALS, CREDENTIALS) is None
    assert re.search(why, str(restore_gate.excess(replace(CREDENTIALS, **change), CREDENTIALS)))


def test_fewer_rights_are_accepted() -> None:
    """As the job has dropped them; ``SECBIT_KEEP_CAPS`` may be set by any process."""
    less = replace(CREDENTIALS, gids=frozenset({4}), groups=frozenset(), capabilities={"CapEff": 0, "CapBnd": 0b10})
    assert restore_gate.excess(replace(less, securebits=1 << 4), CREDENTIALS) is None
    assert restore_gate.excess(CREDENTIALS, replace(CREDENTIALS, no_new_privs=False, seccomp=0)) is None


def test_credentials_of_an_image_are_those_that_criu_restores(tmp_path: Path) -> None:
    """Capabilities have two words. CRIU merges repeated fields, so that they are refused."""
    numbers: list[Field] = [(field, 2001) for field in range(1, 9)]
    sets: list[Field] = [(field, word) for field in (9, 10, 11, 12, 19) for word in (field, 1)]
    creds = message(*numbers, *sets, (13, 1 << 2), (14, 4), (14, 6), (18, 1))
    cores: dict[int, list[Field]] = {
        2: [(5, message((10, creds), (11, 2)))],
        3: [(5, message((10, creds))), (5, message((10, creds)))],
        4: [(5, message((10, creds), (10, message((13, 0)))))],
    }
    for number, fields in cores.items():
        (tmp_path / f"core-{number}.img").write_bytes(image(message((1, 1), (3, message((1, 1))), *fields)))
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        result = restore_gate.of_image(directory, 2)
        for number in (3, 4):
            with pytest.raises(BadImage, match="twice"):
                restore_gate.of_image(directory, number)
    finally:
        os.close(directory)
    high = 1 << 32
    bits = {"CapInh": high | 9, "CapPrm": high | 10, "CapEff": high | 11, "CapBnd": high | 12, "CapAmb": high | 19}
    item = frozenset({2001})
    assert result == Credentials(item, item, frozenset({4, 6}), bits, True, 2, 1 << 2)
