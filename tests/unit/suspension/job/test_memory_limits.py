"""Memory limits of jobs, raised for a suspension and lowered again."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from slurm_affinode.base.pidfd import Id, Process
from slurm_affinode.checkpoint.inspection import SpareMemory
from slurm_affinode.suspension.job.memory_limits import (
    AllocatedMemory,
    ExceededLimit,
    LimitRoom,
    MemoryLimitError,
    MemoryLimits,
)

from .cgroup_site import GIB, LIMIT, MIB, CgroupSite

PID = 4_200_000
INIT = Id(PID, 1)
PLENTY = SpareMemory(1 << 40, 0, 0)


@pytest.fixture(params=[1, 2])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CgroupSite:
    return CgroupSite(tmp_path, request.param, monkeypatch)


def spare(allocated: AllocatedMemory) -> SpareMemory:
    return PLENTY


def unexpected(excess: ExceededLimit) -> None:
    raise AssertionError(excess)


def test_limits_are_raised_and_restored(site: CgroupSite) -> None:
    """All levels that Slurm limits, and no other; Slurm's values are restored afterwards."""
    site.add(7, PID, 32 * GIB, 10 * GIB)
    limits = site.limits()
    assert limits.room(7, INIT) == LimitRoom(22 * GIB, None)
    assert limits.make_room(7, INIT, 60 * GIB, spare)
    assert site.values(7) == [92 * GIB] * 2
    unlimited = site.directories[7] / "step_batch" / ("task_0" if site.version == 1 else "")
    assert (unlimited / LIMIT[site.version]).read_text().strip() in ("max", "9223372036854771712")
    assert limits.raised_bytes(7) == 60 * GIB
    site.use(7, 70 * GIB)
    assert not limits.lower(7)
    site.use(7, 10 * GIB)
    assert limits.lower(7)
    assert site.values(7) == [32 * GIB] * 2
    assert (limits.raised_bytes(7), site.records(), site.killed) == (0, [], [])


def test_limit_with_room_is_not_raised(site: CgroupSite) -> None:
    """Memory that the kernel can reclaim counts as room."""
    job = site.add(7, PID, 10 * GIB, 6 * GIB)
    for place in (job, *(path for path in job.rglob("*") if path.is_dir())):
        (place / "memory.stat").write_text(f"inactive_file {GIB}\ntotal_inactive_file {2 * GIB}\n")
    limits = site.limits()
    assert not limits.make_room(7, INIT, 6 * GIB, spare)
    assert (site.values(7), site.records()) == ([10 * GIB] * 2, [])


def test_swap_limit_is_raised_first_and_lowered_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel rejects a limit of memory above that of memory and swap (``ConstrainSwapSpace``)."""
    site = CgroupSite(tmp_path, 1, monkeypatch)
    site.add(7, PID, 4 * GIB, GIB)
    for place in site.limited(7):
        (place / "memory.memsw.limit_in_bytes").write_text(f"{5 * GIB}\n")
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    assert (site.values(7), site.values(7, "memory.memsw.limit_in_bytes")) == ([12 * GIB] * 2, [13 * GIB] * 2)
    assert limits.lower(7)
    assert (site.values(7), site.values(7, "memory.memsw.limit_in_bytes")) == ([4 * GIB] * 2, [5 * GIB] * 2)


def test_throttling_limit_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above ``memory.high`` the kernel slows down processes that allocate memory."""
    site = CgroupSite(tmp_path, 2, monkeypatch)
    job = site.add(7, PID, 4 * GIB, GIB)
    (job / "memory.high").write_text(f"{3 * GIB}\n")
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    assert (job / "memory.high").read_text().strip() == str(11 * GIB)
    assert limits.lower(7)
    assert (job / "memory.high").read_text().strip() == str(3 * GIB)


def test_limit_changed_by_slurm_is_kept(site: CgroupSite) -> None:
    """``scontrol update --mem`` while the limit is raised."""
    site.add(7, PID, 32 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 60 * GIB, spare)
    site.set(7, 16 * GIB)
    assert limits.lower(7)
    assert (site.values(7), site.records()) == ([16 * GIB] * 2, [])


def test_job_may_free_its_memory_in_the_grace_period(site: CgroupSite) -> None:
    """No process of the job is ended; other agents do not extend the period."""
    site.add(7, PID, 4 * GIB, GIB)
    site.limits().make_room(7, INIT, 8 * GIB, spare)
    site.use(7, 6 * GIB)
    for _ in range(5):
        site.limits().tend(list, unexpected)
        assert site.values(7) == [12 * GIB] * 2
        site.clock += 11
    site.use(7, GIB)
    site.limits().tend(list, unexpected)
    assert (site.values(7), site.records(), site.killed) == ([4 * GIB] * 2, [], [])


@pytest.mark.parametrize("restarted", [False, True])
def test_job_that_keeps_memory_is_out_of_memory(site: CgroupSite, restarted: bool) -> None:
    """The kernel ends processes after the grace period, until the rest fits below Slurm's limit."""
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    site.use(7, 6 * GIB)
    assert not limits.lower(7)
    site.clock += 61
    assert not limits.lower(7)  # nothing but ``tend`` ends processes
    assert site.killed == []
    site.survivors = [GIB, 5 * GIB]
    seen: list[ExceededLimit] = []
    (site.limits() if restarted else limits).tend(list, seen.append)
    assert seen == [ExceededLimit(7, 6 * GIB, 4 * GIB, 0)]
    assert site.killed == [str(site.limited(7)[1])] * 2
    assert (site.values(7), site.records()) == ([4 * GIB] * 2, [])
    limits.tend(list, unexpected)


def test_failed_kills_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1: the job uses as much as before, and no more than that."""
    site = CgroupSite(tmp_path, 1, monkeypatch)
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    site.use(7, 6 * GIB)
    limits.tend(list, unexpected)
    site.clock += 61
    site.survivors = [6 * GIB]
    seen: list[ExceededLimit] = []
    for _ in range(3):
        limits.tend(list, seen.append)
        assert site.values(7) == [6 * GIB] * 2
    assert [item.rounds for item in seen] == [0, 1, 2]


def test_reclaimable_memory_is_not_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 reclaims the page cache when the limit is written: no process is ended."""
    site = CgroupSite(tmp_path, 1, monkeypatch)
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    site.use(7, 6 * GIB)
    assert not limits.lower(7)
    site.clock += 61
    site.before_write = lambda name, value: site.use(7, 3 * GIB)
    limits.tend(list, unexpected)
    assert (site.values(7), site.records(), site.killed) == ([4 * GIB] * 2, [], [])


def test_raised_limit_is_not_raised_again(site: CgroupSite) -> None:
    """A job has to return what it got by one raise before the next."""
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    site.use(7, 6 * GIB)
    for agent in (limits, site.limits()):
        with pytest.raises(MemoryLimitError, match=r"still raised for an earlier suspension: the job still uses more"):
            agent.make_room(7, INIT, 2 * GIB, spare)
        assert (site.values(7), agent.raised_bytes(7)) == ([12 * GIB] * 2, 8 * GIB)
    site.use(7, 3 * GIB)
    assert limits.make_room(7, INIT, 2 * GIB, spare) == 2 * GIB
    assert site.values(7) == [6 * GIB] * 2


def test_unreadable_record_is_kept(site: CgroupSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without free descriptors, no limit is raised, and none that is raised is forgotten."""
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)

    def exhausted(path: Path, *arguments: str) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", exhausted)
        limits.tend(list, unexpected)
        assert not limits.lower(7)
        assert limits.raised_bytes(7) is None
        with pytest.raises(MemoryLimitError):
            limits.make_room(7, INIT, GIB, spare)
    assert (site.values(7), site.records()) == ([12 * GIB] * 2, ["7.json"])
    limits.tend(list, unexpected)
    assert (site.values(7), site.records()) == ([4 * GIB] * 2, [])


def test_promise_is_the_memory_that_jobs_may_still_use(site: CgroupSite) -> None:
    """Memory that Slurm has allocated itself does not count, nor does memory in use."""
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    assert limits.promised() == 0
    limits.make_room(7, INIT, 8 * GIB, spare)
    assert limits.promised() == 8 * GIB
    site.use(7, 9 * GIB)
    assert site.limits().promised() == 3 * GIB
    site.use(7, GIB)
    limits.lower(7)
    assert limits.promised() == 0


def test_use_of_a_job(site: CgroupSite) -> None:
    site.add(7, PID, 4 * GIB, 3 * GIB)
    assert site.limits().used(7, INIT) == 3 * GIB
    assert site.limits().used(8, INIT) is None


def test_busy_limit_is_lowered_later(site: CgroupSite) -> None:
    """The kernel could not reclaim enough: the job used more when the limit was written than when it was read."""
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)

    def busy(name: str, value: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    site.before_write = busy
    assert not limits.lower(7)
    site.before_write = lambda name, value: None
    site.limits().tend(list, unexpected)
    assert (site.values(7), site.records()) == ([4 * GIB] * 2, [])


def test_dirty_pages_delay_the_old_limit(site: CgroupSite) -> None:
    """The kernel may not write them in time, and would end a process instead."""
    job = site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    site.use(7, 5 * GIB)
    keys = ("inactive_file", "file_dirty") if site.version == 2 else ("total_inactive_file", "total_dirty")
    for place in (job, *(path for path in job.rglob("*") if path.is_dir())):
        (place / "memory.stat").write_text("".join(f"{key} {2 * GIB}\n" for key in keys))
    assert not limits.lower(7)
    assert (site.values(7), site.killed) == ([12 * GIB] * 2, [])


@pytest.mark.parametrize("free", [59, 60, 80, 82, 90])
def test_increase_is_bounded_by_spare_memory(site: CgroupSite, free: int) -> None:
    """60 GiB are needed: refused with less, and at most what the node can spare is permitted."""
    site.add(7, PID, 32 * GIB, 10 * GIB)
    limits = site.limits()
    available = SpareMemory((free + 7) * GIB, 5 * GIB, 2 * GIB)
    if free < 60:
        with pytest.raises(MemoryLimitError, match=r"can spare 59 GiB \(66 GiB free, less 5 GiB allocated to other"):
            limits.make_room(7, INIT, 60 * GIB, lambda allocated: available)
        assert (site.values(7), site.records()) == ([32 * GIB] * 2, [])
        return
    limits.make_room(7, INIT, 60 * GIB, lambda allocated: available)
    assert site.values(7) == [(10 + min(free, 82)) * GIB] * 2


def test_unknown_spare_memory_is_none(site: CgroupSite) -> None:
    """The spare memory is unknown if Slurm does not respond."""
    site.add(7, PID, 32 * GIB, 10 * GIB)
    with pytest.raises(MemoryLimitError, match="Slurm does not report"):
        site.limits().make_room(7, INIT, 60 * GIB, lambda allocated: None)
    assert site.values(7) == [32 * GIB] * 2


def test_limit_above_the_job_is_respected(site: CgroupSite) -> None:
    """The site limits all jobs together."""
    site.add(7, PID, 32 * GIB, 10 * GIB)
    (site.top / LIMIT[site.version]).write_text(f"{50 * GIB}\n")
    limits = site.limits()
    assert limits.room(7, INIT) == LimitRoom(22 * GIB, 50 * GIB)
    with pytest.raises(MemoryLimitError, match="above those of the job leaves 50 GiB"):
        limits.make_room(7, INIT, 60 * GIB, spare)
    assert site.values(7) == [32 * GIB] * 2


def test_allocated_memory_of_other_jobs(site: CgroupSite) -> None:
    """Unused memory of other jobs, also of sleepers with a raised limit, which counts as Slurm has set it."""
    site.add(7, PID, 32 * GIB, 10 * GIB)
    site.add(8, PID + 1, 20 * GIB, 5 * GIB)
    site.add(9, PID + 2, 8 * GIB, 8 * GIB, name="sCG1M82P3AJZ00")
    (site.top / "system").mkdir()
    limits = site.limits()

    def allocated() -> tuple[int, int, int]:
        memory = limits.allocated(7, INIT)
        return sum(memory.limits.values()) // GIB, memory.unused // GIB, memory.raised_bytes // GIB

    assert allocated() == (60, 15, 0)
    limits.make_room(8, Id(PID + 1, 1), 100 * GIB, spare)
    assert allocated() == (60, 115, 100)
    site.use(8, 100 * GIB)
    assert allocated() == (60, 20, 20)


def test_starting_job_counts_while_others_start_and_end() -> None:
    """Slurm has allocated 10 GiB to a job without a cgroup, and 5 GiB to one that has existed throughout the query."""
    both, ended, started = (1, 1), (1, 2), (1, 3)
    before = AllocatedMemory({both: 5 * GIB, ended: 10 * GIB}, 0)
    after = AllocatedMemory({both: 5 * GIB, started: 10 * GIB}, 0)
    assert after.starting(15 * GIB, before) == 10 * GIB


def test_limit_above_the_allocation_hides_no_starting_job() -> None:
    """``AllowedRAMSpace=120``."""
    memory = AllocatedMemory({(1, 1): 12 * GIB}, 0)
    assert memory.starting(13 * GIB, memory, 1.2) == 3 * GIB
    assert memory.starting(12 * GIB, memory, 0.5) == 0  # fewer than allocated


def test_memory_above_the_jobs_is_promised_once(site: CgroupSite) -> None:
    """Two jobs need 20 GiB each, and a cgroup above them has room for one."""
    site.add(7, PID, 4 * GIB, GIB)
    site.add(8, PID + 1, 4 * GIB, GIB)
    (site.top / LIMIT[site.version]).write_text(f"{30 * GIB}\n")
    limits = site.limits()
    limits.make_room(7, INIT, 20 * GIB, spare)
    with pytest.raises(MemoryLimitError, match="above those of the job leaves 10 GiB"):
        limits.make_room(8, Id(PID + 1, 1), 20 * GIB, spare)
    assert site.values(8) == [4 * GIB] * 2


def test_jobs_share_spare_memory_at_most_once(site: CgroupSite) -> None:
    """For many random nodes, whatever is raised: limits never permit more than the node has, beyond Slurm's own."""
    rng = random.Random(7)  # noqa: S311
    for round_ in range(20):
        shutil.rmtree(site.top)
        site._make(site.top)
        jobs = range(1, rng.randint(2, 6))
        facts = {job: (rng.randint(1, 40) * GIB, rng.randint(0, 1000)) for job in jobs}
        used = {job: limit * share // 1000 for job, (limit, share) in facts.items()}
        for job in jobs:
            site.add(job, PID + job, facts[job][0], used[job])
        free = rng.randint(0, 150) * GIB + sum(limit for limit, _ in facts.values()) - sum(used.values())
        limits = site.limits()
        for job in jobs:
            needed = rng.randint(1, 80) * GIB

            def node(allocated: AllocatedMemory) -> SpareMemory:
                return SpareMemory(free, allocated.unused, 2 * GIB)  # noqa: B023 - called at once

            before = site.values(job)
            try:
                limits.make_room(job, Id(PID + job, 1), needed, node)
            except MemoryLimitError:
                assert site.values(job) == before
            else:
                assert min(site.values(job)) - used[job] >= needed
            permitted = sum(max(site.values(item)) - used[item] for item in jobs)
            assert permitted <= max(free, sum(facts[item][0] - used[item] for item in jobs)) + len(jobs) * MIB, round_
        for job in jobs:
            assert limits.lower(job)
            assert site.values(job) == [facts[job][0]] * 2
        assert site.records() == []


def test_crash_before_each_write_leaves_no_raised_limit(site: CgroupSite) -> None:
    """The agent is killed while it raises, and the next one while it lowers."""
    site.add(7, PID, 4 * GIB, GIB)
    done = False
    for raised in range(4):
        for lowered in range(4):
            left = [raised]

            def crash(name: str, value: str, left: list[int] = left) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1

            site.before_write = crash
            try:
                site.limits().make_room(7, INIT, 8 * GIB, spare)
                done = True
            except KeyboardInterrupt:
                pass
            left[0] = lowered
            try:
                site.limits().tend(list, unexpected)
            except KeyboardInterrupt:
                site.before_write = lambda name, value: None
                site.limits().tend(list, unexpected)
            site.before_write = lambda name, value: None
            assert (site.values(7), site.records()) == ([4 * GIB] * 2, [])
    assert done


def test_failed_write_changes_nothing(site: CgroupSite) -> None:
    """The limits that were raised already are lowered."""
    site.add(7, PID, 4 * GIB, GIB)
    failing = iter([False, True])

    def fail(name: str, value: str) -> None:
        if next(failing, False):
            raise PermissionError(13, "Permission denied")

    site.before_write = fail
    with pytest.raises(MemoryLimitError, match="cannot be raised: Permission denied"):
        site.limits().make_room(7, INIT, 8 * GIB, spare)
    assert (site.values(7), site.records()) == ([4 * GIB] * 2, [])


def test_limit_of_suspended_job_stays_raised(site: CgroupSite) -> None:
    """It stays raised until its suspension has left the journal, also under the next agent."""
    site.add(7, PID, 4 * GIB, GIB)
    site.limits().make_room(7, INIT, 8 * GIB, spare)
    limits = site.limits()
    limits.tend(lambda: [7], unexpected)
    assert site.values(7) == [12 * GIB] * 2
    assert limits.raised_bytes(7) == 8 * GIB
    limits.make_room(7, INIT, 20 * GIB, spare)  # for a restore that begins again
    assert min(site.values(7)) >= 21 * GIB
    limits.tend(list, unexpected)
    assert site.values(7) == [4 * GIB] * 2


def test_suspension_that_begins_meanwhile_keeps_its_limit(site: CgroupSite) -> None:
    """Its journal was opened after the journals were read."""
    site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)

    def suspended() -> list[int]:
        limits.make_room(7, INIT, 8 * GIB, spare)
        return []

    limits.tend(suspended, unexpected)
    assert site.values(7) == [12 * GIB] * 2


def test_cgroup_of_a_later_attempt_is_not_changed(site: CgroupSite) -> None:
    """The cgroup has the same path and, by chance, the same limit."""
    job = site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    limits.make_room(7, INIT, 8 * GIB, spare)
    job.rename(job.with_name("kept"))  # so that its inode is not used again
    site.add(7, PID + 1, 12 * GIB, GIB)
    assert limits.lower(7)
    assert (site.values(7), site.records()) == ([12 * GIB] * 2, [])


def test_record_of_an_earlier_boot_is_dropped(site: CgroupSite) -> None:
    """The inodes of cgroups are reused after a boot."""
    site.add(7, PID, 4 * GIB, GIB)
    site.limits().make_room(7, INIT, 8 * GIB, spare)
    (site.proc / "sys/kernel/random/boot_id").write_text("b1\n")
    site.limits().tend(list, unexpected)
    assert (site.values(7), site.records()) == ([12 * GIB] * 2, [])


@pytest.mark.parametrize("text", ["", "{}", '{"version":2}', '{"version":1,"boot":"b0","limits":[{"cgroup":"/"}]}'])
def test_damaged_record_is_dropped(site: CgroupSite, text: str) -> None:
    (site.root / "records").mkdir()
    (site.root / "records" / "7.json").write_text(text)
    site.limits().tend(list, unexpected)
    assert site.records() == []


def test_record_of_a_later_release_is_used(site: CgroupSite) -> None:
    """A limit that a later release has raised is lowered after a downgrade of the node."""
    site.add(7, PID, 4 * GIB, GIB)
    site.limits().make_room(7, INIT, 8 * GIB, spare)
    (path,) = (site.root / "records").iterdir()
    value = json.loads(path.read_text())
    value["limits"] = [{**limit, "later": 1} for limit in value["limits"]]
    path.write_text(json.dumps({**value, "later": 1}))
    assert site.limits().lower(7)
    assert (site.values(7), site.records()) == ([4 * GIB] * 2, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_cgroup_of_a_user_is_not_changed(site: CgroupSite) -> None:
    os.chown(site.add(7, PID, 4 * GIB, GIB), 1000, 1000)
    assert site.limits().room(7, INIT) is None


def test_cgroups_of_others_are_not_changed(site: CgroupSite, tmp_path: Path) -> None:
    """Cgroups of another job, behind a link, or of an ended process are not changed."""
    job = site.add(7, PID, 4 * GIB, GIB)
    limits = site.limits()
    assert limits.room(8, INIT) is None
    assert limits.room(7, Id(PID, 2)) is None
    assert limits.room(7, Id(PID + 9, 1)) is None
    moved = tmp_path / "moved"
    job.rename(moved)
    job.symlink_to(moved)
    assert site.limits().room(7, INIT) is None
    assert not site.limits().make_room(7, INIT, 8 * GIB, spare)
    assert site.records() == []


@pytest.mark.parametrize(
    "path",
    ["/user.slice/user-1.slice/user@1.service/slurmstepd.scope/job_7", "/slurm/../slurm/job_7", "/docker/1", "/"],
)
def test_path_that_slurmd_does_not_use_has_no_limits(site: CgroupSite, path: str) -> None:
    """A user with systemd's delegation can create such cgroups."""
    place = site.cgroups / ("memory" if site.version == 1 else "") / path.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    site.process(PID, site.top)
    line = f"4:memory:{path}\n" if site.version == 1 else f"0::{path}\n"
    (site.proc / str(PID) / "cgroup").write_text(line)
    (place / LIMIT[site.version]).write_text("1000000\n")
    assert site.limits().room(7, INIT) is None


# --- the kernel's own cgroups

MEMORY = Path("/sys/fs/cgroup/memory")
HOLDER = """
import sys
held = None
for line in sys.stdin:
    held = None
    held = bytearray(int(line)) if int(line) else None
    print("done", flush=True)
"""


@pytest.fixture
def real_job() -> Iterator[Path]:
    """Cgroups of version 1 as slurmd creates them for job 7, with 64 MiB."""
    top = MEMORY / f"slurm_test{os.getpid()}"
    job = top / "uid_0/job_7"
    places = (job / "step_batch/task_0", job / "step_batch", job, job.parent, top)
    try:
        (job / "step_batch/task_0").mkdir(parents=True)
        for place in (job, job / "step_batch"):
            (place / "memory.limit_in_bytes").write_text(str(64 * MIB))
    except OSError as error:
        for place in places:
            _removed(place)
        pytest.skip(f"cgroups of version 1 cannot be created here: {error.strerror}")
    yield job
    for place in places:
        wait_until(f"{place} is removed", lambda place=place: _removed(place))  # type: ignore[misc]


def _removed(place: Path) -> bool:
    try:
        place.rmdir()
    except OSError:
        return not place.exists()
    return True


@pytest.fixture
def holder(real_job: Path) -> Iterator[MemoryHolder]:
    """Yield a process in the job's cgroup."""
    made = MemoryHolder()
    try:
        (real_job / "step_batch/task_0/cgroup.procs").write_text(str(made.process.pid))
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


class MemoryHolder:
    """A process that holds memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with Process(self.process.pid) as process:
            self.id = process.id

    def hold(self, count: int) -> None:
        """Have it hold this many bytes."""
        assert self.process.stdout is not None
        print(count, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"


def real_limits(job: Path) -> list[int]:
    return [int((place / "memory.limit_in_bytes").read_text()) for place in (job, job / "step_batch")]


def test_limit_of_real_cgroup_is_raised_and_restored(real_job: Path, holder: MemoryHolder, tmp_path: Path) -> None:
    """A process uses the additional memory; the kernel does not lower the limit before it is freed, nor ends it."""
    limits = MemoryLimits(tmp_path / "records")
    holder.hold(30 * MIB)
    room = limits.room(7, holder.id)
    assert room is not None
    assert 0 < room.in_job < 40 * MIB
    assert limits.make_room(7, holder.id, 200 * MIB, spare)
    assert real_limits(real_job) == [264 * MIB] * 2
    holder.hold(200 * MIB)
    assert not limits.lower(7)
    assert real_limits(real_job) == [264 * MIB] * 2
    again = MemoryLimits(tmp_path / "records")
    holder.hold(0)
    again.tend(list, unexpected)
    assert real_limits(real_job) == [64 * MIB] * 2
    assert list((tmp_path / "records").iterdir()) == []
    assert holder.process.poll() is None


def test_kernel_ends_process_that_keeps_memory(real_job: Path, holder: MemoryHolder, tmp_path: Path) -> None:
    """It allocates nothing more, and is killed nevertheless after the grace period."""
    now = 1000.0
    limits = MemoryLimits(tmp_path / "records", clock=lambda: now)
    limits.make_room(7, holder.id, 200 * MIB, spare)
    holder.hold(200 * MIB)
    limits.tend(list, unexpected)
    now += 61
    seen: list[ExceededLimit] = []
    limits.tend(list, seen.append)
    assert [item.limit for item in seen] == [64 * MIB]
    assert holder.process.wait(10) == -signal.SIGKILL
    limits.tend(list, seen.append)
    assert real_limits(real_job) == [64 * MIB] * 2
