"""Promises: which node frees GPUs for which pending job."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.core.policy import Promise, Waiting
from slurm_affinode.suspension.records.promises import SETTLE_S, Promises

KEY = bytes(32)
WAITING = Waiting(99, "99", ("gpu",), "Resources", is_held=False, priority=1, gpus=1)


class Clock:
    """A clock in seconds that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def node(root: Path | None, name: str, clock: Clock) -> Promises:
    return Promises(root, "test", Signer(KEY, name), lasts_s=600, now=clock)


def test_first_node_gets_promise_and_others_see_it(tmp_path: Path, clock: Clock) -> None:
    """The second node sees it when it tries itself, the third one when it looks."""
    item, two, three = (node(tmp_path, name, clock) for name in ("c1", "c2", "c3"))
    assert item.take(WAITING, 1) == "test.99.0"
    assert two.take(WAITING, 1) is None
    three.refresh()
    assert item.known() == two.known() == three.known() == (Promise(99, "c1", 1),)


def test_promises_of_clusters_and_jobs_are_independent(tmp_path: Path, clock: Clock) -> None:
    """Each has its own files."""
    item, two = node(tmp_path, "c1", clock), Promises(tmp_path, "other", Signer(KEY, "c2"), lasts_s=600, now=clock)
    assert item.take(WAITING, 1)
    assert two.take(WAITING, 1)
    assert node(tmp_path, "c3", clock).take(replace(WAITING, job_id=100), 1)


def test_withdrawn_promise_can_be_taken_by_others(tmp_path: Path, clock: Clock) -> None:
    """The suspension was aborted: another node may serve the job."""
    item, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    name = item.take(WAITING, 1)
    assert name
    item.leave(name, 1, freed=False)
    assert item.known() == ()
    assert two.take(WAITING, 1)


def test_fulfilled_promise_lasts_until_slurm_has_started_job(tmp_path: Path, clock: Clock) -> None:
    """Other nodes have an older view of the queue; a job that still waits after a while may get other GPUs."""
    item, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    name = item.take(WAITING, 1)
    assert name
    item.leave(name, 1, freed=True)
    assert two.take(WAITING, 1) is None
    clock.now += SETTLE_S + 1
    two.refresh()
    assert two.known() == item.known() == ()
    assert two.take(WAITING, 1)


def test_promise_of_dead_agent_expires(tmp_path: Path, clock: Clock) -> None:
    """The promise expires, or is removed by the next agent of its node."""
    node(tmp_path, "c1", clock).take(WAITING, 1)
    other = node(tmp_path, "c2", clock)
    assert other.take(WAITING, 1) is None
    node(tmp_path, "c1", clock).refresh()
    assert other.take(WAITING, 1)
    clock.now += 601
    assert node(tmp_path, "c3", clock).take(WAITING, 1)


def test_promise_of_two_suspensions_is_shared(tmp_path: Path, clock: Clock) -> None:
    """Their GPUs add up in one promise, which lasts until the last of them has ended."""
    big = replace(WAITING, gpus=2)
    item, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    name = item.take(big, 1)
    assert name == item.take(big, 1)
    assert item.known() == (Promise(99, "c1", 2),)
    assert item.take(big, 1) is None
    item.leave(name, 1, freed=True)
    clock.now += SETTLE_S + 1
    assert two.take(big, 1) is None
    item.leave(name, 1, freed=False)
    assert item.known() == (Promise(99, "c1", 1),)
    clock.now += SETTLE_S + 1
    assert two.take(big, 2)


def test_array_tasks_are_served_individually(tmp_path: Path, clock: Clock) -> None:
    """A record with three tasks accepts three promises, from any nodes."""
    array = replace(WAITING, tasks=3)
    item, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    assert [item.take(array, 1), two.take(array, 1), item.take(array, 1)] == ["test.99.0", "test.99.1", "test.99.2"]
    assert two.take(array, 1) is None
    assert len(two.known()) == 3


def test_concurrent_attempts_yield_one_promise(tmp_path: Path, clock: Clock) -> None:
    """One of twelve nodes that try at the same time succeeds."""
    barrier, names = threading.Barrier(12), []

    def try_it(promises: Promises) -> None:
        barrier.wait()
        names.append(promises.take(WAITING, 1))

    threads = [threading.Thread(target=try_it, args=(node(tmp_path, f"c{n}", clock),)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name in names if name) == ["test.99.0"]


def test_promise_made_while_an_expired_one_is_removed_is_kept(tmp_path: Path, clock: Clock) -> None:
    """Two nodes find the same expired promise; the slower one must not delete the promise of the faster one."""
    assert node(tmp_path, "c3", clock).take(WAITING, 1)
    clock.now += 601
    item, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    read, taken = item._read, []

    def slow_read(path: Path) -> object:
        result = read(path)
        if not taken:
            taken.append(two.take(WAITING, 1))
        return result

    item._read = slow_read  # type: ignore[assignment, method-assign]
    assert item.take(WAITING, 1) is None
    assert taken == ["test.99.0"]
    item.refresh()
    assert item.known() == two.known() == (Promise(99, "c2", 1),)
    assert sorted(path.name for path in (tmp_path / "promises").iterdir()) == ["test.99.0"]


@pytest.mark.parametrize("kind", ["fifo", "link"])
@pytest.mark.parametrize("name", ["test.99.0", ".test.99.0.c1"])
def test_special_file_in_place_of_a_promise_is_removed_unopened(
    tmp_path: Path, clock: Clock, kind: str, name: str
) -> None:
    """A writer of the export without the key can create one, also under the name of the draft.

    A FIFO would block the agent; through a link it would write to any file of its node.
    """
    path = tmp_path / "promises" / name
    path.parent.mkdir()
    target = tmp_path / "target"
    target.write_text("kept", encoding="utf-8")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    item = node(tmp_path, "c1", clock)
    assert item.take(WAITING, 1) == "test.99.0"
    made = tmp_path / "promises" / "test.99.0"
    assert made.is_file()
    assert not made.is_symlink()
    assert list(made.parent.iterdir()) == [made]
    assert target.read_text(encoding="utf-8") == "kept"


def test_promises_without_shared_directory_are_local(clock: Clock) -> None:
    """There are no other nodes to inform."""
    alone = node(None, "c1", clock)
    name = alone.take(WAITING, 1)
    assert name
    assert alone.take(WAITING, 1) is None
    alone.leave(name, 1, freed=False)
    assert alone.known() == ()


def test_unwritable_directory_is_an_error(tmp_path: Path, clock: Clock) -> None:
    """Nothing is suspended without a promise; an unreadable directory holds no promises."""
    (tmp_path / "promises").write_text("")
    with pytest.raises(AffinodeError, match="cannot be written"):
        node(tmp_path, "c1", clock).take(WAITING, 1)
    broken = node(tmp_path, "c1", clock)
    broken.refresh()
    assert broken.known() == ()


def test_invalid_promise_file_is_removed(tmp_path: Path, clock: Clock) -> None:
    """It is removed when a node looks."""
    (tmp_path / "promises").mkdir()
    (tmp_path / "promises" / "test.99.0").write_text("[]")
    item = node(tmp_path, "c1", clock)
    item.refresh()
    assert item.take(WAITING, 1)
