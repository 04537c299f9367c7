"""A short run of every fuzzer, and the detection of failures by the fuzzers themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from fuzz import runner
from fuzz.runner import Check, Target, Wrong
from fuzz.targets import TARGETS

REPOSITORY = Path(__file__).parents[2]
INPUTS = 200


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command of ``make fuzz``."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY / "tests"), "PYTHONHASHSEED": "0"}
    return subprocess.run(
        (sys.executable, "-m", "fuzz", *arguments),
        cwd=REPOSITORY,
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("part", range(4))
def test_short_run_has_no_failures(part: int) -> None:
    """The seed is fixed, so that the test is reproducible."""
    names = sorted(TARGETS)[part::4]
    ran = fuzz(*names, "--inputs", str(INPUTS), "--jobs", "1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {line.split()[0] for line in ran.stdout.splitlines()[1:]} == set(names)


def test_targets_run_side_by_side_with_the_same_results() -> None:
    """The rows are in the same order, whichever target ends first."""
    names = ("claim", "ledger", "plan")
    alone, beside = (fuzz(*names, "--inputs", "100", "--jobs", jobs) for jobs in ("1", "3"))
    rows = [[line.split() for line in ran.stdout.splitlines()] for ran in (alone, beside)]
    assert [row[0] for row in rows[0]] == ["target", "plan", "claim", "ledger"]
    assert [row[:2] + row[3:] for row in rows[0]] == [row[:2] + row[3:] for row in rows[1]]
    assert alone.returncode == beside.returncode == 0


def target(check: Check, refusals: tuple[type[Exception], ...] = (), limit_s: float = 5.0) -> Target:
    """Return a target with one check and with numbers as inputs."""

    @contextmanager
    def session() -> Iterator[Check]:
        yield check

    return Target("test", "", lambda rng: str(rng.randrange(100)).encode(), session, refusals, limit_s)


def test_refusals_and_acceptances_are_counted() -> None:
    outcome = runner.run_apart(target(lambda data: int(data) < 50 or bool(int("x"))), 0, 1)
    assert (outcome.inputs, outcome.failures) == (0, [])
    outcome = runner.run_apart(target(lambda data: int(data) < 50, (ValueError,)), 200, 1)
    assert (outcome.inputs, outcome.refused + outcome.accepted, outcome.failures) == (200, 200, [])
    assert outcome.accepted > 0 < outcome.refused


def _raise(error: BaseException) -> Callable[[bytes], bool]:
    def check(data: bytes) -> bool:
        raise error

    return check


def _sleep(data: bytes) -> bool:
    time.sleep(60)
    return True


def _die(data: bytes) -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


_kept: list[object] = []


def _leak_descriptor(data: bytes) -> bool:
    _kept.append(os.open("/", os.O_PATH))
    return True


def _leak_thread(data: bytes) -> bool:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return True


def _take_memory(data: bytes) -> bool:
    _kept.append(bytearray(runner.MEMORY_LIMIT * 2))
    return True


def _grow(data: bytes) -> bool:
    _kept.append(bytearray(b"x" * (64 << 10)))
    return True


@pytest.mark.parametrize(
    ("check", "inputs", "message"),
    [
        (_raise(KeyError("x")), 3, "KeyError: 'x'"),
        (_raise(Wrong("not what it says")), 3, "Wrong: not what it says"),
        (_sleep, 1, "longer than its time limit"),
        (_die, 3, "the process ended: signal 9"),
        (_leak_descriptor, 1, "left open: 1 descriptors"),
        (_leak_thread, 1, "1 threads"),
        (_take_memory, 1, "MemoryError"),
        (_grow, 10000, "memory has grown"),
    ],
)
def test_undeclared_outcome_is_a_failure(
    check: Check, inputs: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure has its input, its number and a description."""
    monkeypatch.setattr(runner, "SETTLE_S", 0.1)
    monkeypatch.setattr(runner, "CORPUS", Path("/nonexistent"))
    outcome = runner.run_apart(target(check, limit_s=0.2 if check is _sleep else 5.0), inputs, 1)
    assert len(outcome.failures) == 1
    assert message in outcome.failures[0].what
    assert outcome.failures[0].data in (b"", *islice(runner.inputs(target(check), 1), inputs))


def test_same_seed_gives_same_inputs() -> None:
    """They are the same from any number on; another seed gives other inputs."""
    for item in TARGETS.values():
        if item.whole is None:
            recorded = len(list((runner.CORPUS / item.name).glob("*")))
            inputs = list(islice(runner.inputs(item, 3), recorded, recorded + 20))
            assert inputs == list(islice(runner.inputs(item, 3), recorded, recorded + 20))
            assert inputs[7:] == list(islice(runner.inputs(item, 3, 7), 13))
            assert inputs != list(islice(runner.inputs(item, 4), recorded, recorded + 20))


def test_single_input_is_replayed(tmp_path: Path) -> None:
    """It uses the command that the report of a failure contains."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"started\nroot=2")
    bad.write_bytes(b"started\nroot=x")
    assert fuzz("shepherd-message", "--replay", str(good)).stdout == "accepted\n"
    assert fuzz("shepherd-message", "--replay", str(bad)).stdout == "refused\n"
    assert fuzz("nothing-*").returncode == 2
