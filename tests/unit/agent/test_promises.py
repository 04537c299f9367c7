"""Which pending job gets its GPUs from which node."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.agent.promises import SETTLE_S, Promises
from slurm_affinode.checkpoint.nodekeys import Signer
from slurm_affinode.core.policy import Promise, Waiting
from slurm_affinode.errors import AffinodeError

KEY = bytes(32)
WAITING = Waiting(99, "99", ("gpu",), "Resources", held=False, priority=1, gpus=1)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def node(root: Path | None, name: str, clock: Clock) -> Promises:
    return Promises(root, "test", Signer(KEY, name), lasts_s=600, now=clock)


def test_first_has_it_and_the_other_sees_that(tmp_path: Path, clock: Clock) -> None:
    """At once by its own attempt, and later by looking."""
    one, two, three = (node(tmp_path, name, clock) for name in ("c1", "c2", "c3"))
    assert one.take(WAITING, 1) == "test.99.0"
    assert two.take(WAITING, 1) is None
    three.look()
    assert one.known() == two.known() == three.known() == (Promise(99, "c1", 1),)


def test_other_clusters_and_jobs_are_not_meant(tmp_path: Path, clock: Clock) -> None:
    """Each has files of its own."""
    one, two = node(tmp_path, "c1", clock), Promises(tmp_path, "other", Signer(KEY, "c2"), lasts_s=600, now=clock)
    assert one.take(WAITING, 1)
    assert two.take(WAITING, 1)
    assert node(tmp_path, "c3", clock).take(replace(WAITING, job_id=100), 1)


def test_withdrawn_promise_is_free_for_others(tmp_path: Path, clock: Clock) -> None:
    """The suspension was taken back: another node may serve the job."""
    one, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    name = one.take(WAITING, 1)
    assert name
    one.leave(name, 1, freed=False)
    assert one.known() == ()
    assert two.take(WAITING, 1)


def test_kept_promise_stands_until_slurm_has_started_the_job(tmp_path: Path, clock: Clock) -> None:
    """The queue that others know is older; when the job still waits after a while it may have other GPUs."""
    one, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    name = one.take(WAITING, 1)
    assert name
    one.leave(name, 1, freed=True)
    assert two.take(WAITING, 1) is None
    clock.now += SETTLE_S + 1
    two.look()
    assert two.known() == one.known() == ()
    assert two.take(WAITING, 1)


def test_agent_that_died_binds_nobody_for_ever(tmp_path: Path, clock: Clock) -> None:
    """Its promise ends by itself, or with the next agent of its node."""
    node(tmp_path, "c1", clock).take(WAITING, 1)
    other = node(tmp_path, "c2", clock)
    assert other.take(WAITING, 1) is None
    node(tmp_path, "c1", clock).look()
    assert other.take(WAITING, 1)
    clock.now += 601
    assert node(tmp_path, "c3", clock).take(WAITING, 1)


def test_job_that_needs_two_jobs_of_a_node_gone(tmp_path: Path, clock: Clock) -> None:
    """Their GPUs add up in one promise, which stands until the last of them is over."""
    big = replace(WAITING, gpus=2)
    one, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    name = one.take(big, 1)
    assert name == one.take(big, 1)
    assert one.known() == (Promise(99, "c1", 2),)
    assert one.take(big, 1) is None
    one.leave(name, 1, freed=True)
    clock.now += SETTLE_S + 1
    assert two.take(big, 1) is None
    one.leave(name, 1, freed=False)
    assert one.known() == (Promise(99, "c1", 1),)
    clock.now += SETTLE_S + 1
    assert two.take(big, 2)


def test_tasks_of_an_array_are_served_one_by_one(tmp_path: Path, clock: Clock) -> None:
    """A record with three tasks takes three promises, of whatever nodes."""
    array = replace(WAITING, tasks=3)
    one, two = node(tmp_path, "c1", clock), node(tmp_path, "c2", clock)
    assert [one.take(array, 1), two.take(array, 1), one.take(array, 1)] == ["test.99.0", "test.99.1", "test.99.2"]
    assert two.take(array, 1) is None
    assert len(two.known()) == 3


def test_two_at_the_same_moment(tmp_path: Path, clock: Clock) -> None:
    """Of twelve nodes that try at once one has it."""
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


def test_without_a_shared_directory_this_node_minds_its_own(clock: Clock) -> None:
    """Nobody else is there to be told."""
    alone = node(None, "c1", clock)
    name = alone.take(WAITING, 1)
    assert name
    assert alone.take(WAITING, 1) is None
    alone.leave(name, 1, freed=False)
    assert alone.known() == ()


def test_directory_that_cannot_be_written(tmp_path: Path, clock: Clock) -> None:
    """Nothing is suspended on what cannot be found out; what cannot be read is not known."""
    (tmp_path / "promises").write_text("")
    with pytest.raises(AffinodeError, match="cannot be written"):
        node(tmp_path, "c1", clock).take(WAITING, 1)
    broken = node(tmp_path, "c1", clock)
    broken.look()
    assert broken.known() == ()


def test_file_that_is_none(tmp_path: Path, clock: Clock) -> None:
    """It goes when somebody looks."""
    (tmp_path / "promises").mkdir()
    (tmp_path / "promises" / "test.99.0").write_text("[]")
    one = node(tmp_path, "c1", clock)
    one.look()
    assert one.take(WAITING, 1)
