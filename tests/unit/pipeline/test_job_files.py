"""Published job summaries: one file per user, readable by that user alone; the reader trusts no other file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.model.finding import JobAttempt
from slurm_affinode.model.job_summary import JobSummary
from slurm_affinode.pipeline import job_files
from slurm_affinode.pipeline.job_files import NoSummaryError
from slurm_affinode.report import job_text

NOW = datetime(2026, 11, 20, 2, tzinfo=UTC)
UIDS = {"ann": 4711, "bob": 4712}
ME = os.geteuid()
only_root = pytest.mark.skipif(ME != 0, reason="only root gives files to other users")


def summary(number: int, user: str = "ann", *, days: float = 1, uid: int | None = None, name: str = "") -> JobSummary:
    """A job that ended ``days`` ago; 0: it runs."""
    end = NOW - timedelta(days=days) if days else None
    start = NOW - timedelta(days=days, hours=4)
    ref = JobAttempt(number, name or str(number), start, start, end, "train", "COMPLETED" if end else "RUNNING", 3600.0)
    return JobSummary(
        job=ref, cluster="c", user=user, uid=uid, account="lab", partition="gpu", qos=None, nodes=("g1",), cpus=8,
        memory_gib=8.0, gpu_count=0, gpu_models=(), until=end or NOW, suspended_s=0.0, slot_s=0.0, uses=(), gpus=(),
        idle_windows=(), suspensions=(), findings=(), verdict="Well used.", advice=(), notes=(), source="published",
        generated=NOW,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Modes do not depend on the umask of the service."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The directory of a site; its users are those of ``UIDS`` and the user who runs the tests."""
    tmp_path.chmod(0o755)
    return tmp_path


def publish(site: Path, *jobs: JobSummary, keep_days: float = 30) -> job_files.Published:
    known = {**UIDS, "me": ME or 4713}
    return job_files.publish(
        site / "jobs", site / "copies", jobs, NOW - timedelta(days=keep_days), uid_of=known.get
    )  # fmt: skip


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def lines(site: Path, uid: int) -> list[int]:
    return [json.loads(line)["job"]["job_id"] for line in (site / "jobs" / f"{uid}.jsonl").read_text().splitlines()]


@only_root
def test_file_belongs_to_its_user_and_directory_is_not_listable(site: Path) -> None:
    """Mode 0600, owner the user; others may enter the directory, and see no names. The copies are the service's."""
    done = publish(site, summary(1), summary(2), summary(3, "bob"))
    assert (done.users, done.jobs, done.skipped) == (2, 3, 0)
    assert stat.S_IMODE((site / "jobs").stat().st_mode) == 0o711
    for uid, jobs in ((4711, [1, 2]), (4712, [3])):
        facts = (site / "jobs" / f"{uid}.jsonl").stat()
        assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (uid, 0o600)
        assert sorted(lines(site, uid)) == jobs
    assert stat.S_IMODE((site / "copies").stat().st_mode) == 0o700
    assert names(site / "jobs") == ["4711.jsonl", "4712.jsonl"]


@only_root
def test_uid_of_accounting_and_machine_must_agree(site: Path) -> None:
    """A UID that another user has here, a user without an account, a job without a user: not published."""
    done = publish(
        site, summary(1, uid=4712), summary(2, "eve", uid=4711), summary(3, "eve"), summary(4, ""), summary(5, uid=4711)
    )
    assert (done.users, done.skipped) == (1, 3)
    assert lines(site, 4711) == [5]


@only_root
def test_earlier_jobs_are_kept_until_they_expire(site: Path) -> None:
    """Each publication adds; a job that ran is replaced by its end, and one that accounting has lost disappears."""
    publish(site, summary(1, days=20), summary(2, days=0), summary(3, days=0))
    publish(site, replace(summary(2, days=0.1), job=replace(summary(2, days=0).job, end=NOW, state="FAILED")))
    assert lines(site, 4711) == [1, 2]
    publish(site, keep_days=10)
    assert lines(site, 4711) == [2]
    publish(site, keep_days=-1)
    assert names(site / "jobs") == names(site / "copies") == []


@only_root
def test_changes_of_the_user_are_not_read_back(site: Path) -> None:
    """The user may write into the own file; the next publication replaces it from the service's copy."""
    publish(site, summary(1))
    path = site / "jobs" / "4711.jsonl"
    path.write_text("{}\n" * 3 + json.dumps({"evil": "x" * 1000}))
    publish(site, summary(2))
    assert sorted(lines(site, 4711)) == [1, 2]


@only_root
def test_uid_that_went_to_another_user_gets_no_old_jobs(site: Path) -> None:
    """The name in each line decides, whenever the file is published again."""
    publish(site, summary(1))
    known = {"new": 4711}
    job_files.publish(site / "jobs", site / "copies", [summary(2, "new")], NOW - timedelta(days=30), uid_of=known.get)
    assert lines(site, 4711) == [2]


@only_root
def test_link_in_place_of_a_file_is_replaced_not_followed(site: Path) -> None:
    """The target keeps its contents and its owner."""
    target = site / "shadow"
    target.write_text("secret")
    publish(site, summary(9, "bob"))
    (site / "jobs" / "4711.jsonl").symlink_to(target)
    publish(site, summary(1))
    assert (target.read_text(), target.stat().st_uid) == ("secret", 0)
    assert not (site / "jobs" / "4711.jsonl").is_symlink()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_directory_that_others_may_write_is_refused(site: Path, mode: int) -> None:
    """They could exchange names in it."""
    (site / "jobs").mkdir()
    (site / "jobs").chmod(mode)
    with pytest.raises(UnreachableError, match="is not used for job summaries: others may write to it"):
        publish(site, summary(1, "me"))
    assert names(site / "jobs") == []


def test_directory_that_is_a_link_is_refused(site: Path) -> None:
    """Its owner could let it point elsewhere."""
    (site / "elsewhere").mkdir()
    (site / "jobs").symlink_to(site / "elsewhere")
    with pytest.raises(AffinodeError, match="cannot be used"):
        publish(site, summary(1, "me"))
    assert names(site / "elsewhere") == []


@only_root
def test_directory_of_another_user_is_refused(site: Path) -> None:
    """Root does not write into it."""
    (site / "jobs").mkdir(mode=0o755)
    os.chown(site / "jobs", 4711, 4711)
    with pytest.raises(UnreachableError, match="it belongs to another user"):
        publish(site, summary(1))


def test_without_right_to_give_files_away_nothing_is_published(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; no file is left that others, or the wrong user, could read."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refused)
    with pytest.raises(UnreachableError, match="files cannot be given to their owners") as error:
        publish(site, summary(1))
    assert "CAP_CHOWN" in (error.value.hint or "")
    assert names(site / "jobs") == []


def write(site: Path, *jobs: JobSummary, more: str = "") -> Path:
    """Write the file of the user who runs the tests, as a publication does."""
    directory = site / "jobs"
    directory.mkdir(exist_ok=True)
    path = directory / f"{ME}.jsonl"
    path.write_text("".join(json.dumps(job.as_json()) + "\n" for job in jobs) + more)
    return directory


def test_reader_finds_the_last_attempt(site: Path) -> None:
    """By the ID as users type it; with the number of attempts."""
    at = write(site, summary(1, days=3), summary(1, days=1), summary(8, name="7_1"), summary(7, name="7_2"))
    last = job_files.read(at, "1")
    assert (last.attempt, last.attempts, last.source) == (2, 2, "published")
    assert last.job.end == NOW - timedelta(days=1)
    assert job_files.read(at, "1", attempt=1).job.end == NOW - timedelta(days=3)
    assert job_files.read(at, "7_1").job.job_id == 8
    assert job_files.read(at, "8").job.id == "7_1"
    with pytest.raises(NoSummaryError, match="no attempt 5"):
        job_files.read(at, "1", attempt=5)
    with pytest.raises(NoSummaryError, match="no summary of a job 2 of yours"):
        job_files.read(at, "2")
    with pytest.raises(NoSummaryError):
        job_files.read(at, "1", cluster="d")


def test_reader_refuses_several_jobs_and_clusters(site: Path) -> None:
    """As the command does with the database."""
    at = write(site, summary(8, name="6_1"), summary(9, name="6_2"), summary(1), replace(summary(1), cluster="d"))
    with pytest.raises(AffinodeError, match="6 is 2 jobs"):
        job_files.read(at, "6")
    with pytest.raises(AffinodeError, match="several clusters have a job 1: c, d"):
        job_files.read(at, "1")
    assert job_files.read(at, "1", cluster="d").cluster == "d"


def test_damaged_line_does_not_hide_other_jobs(site: Path) -> None:
    """A job that is not found is possibly in the damaged line, which the message names."""
    at = write(site, summary(1), more='{"version": 1, "job"\n')
    assert job_files.read(at, "1").job.job_id == 1
    with pytest.raises(InputError, match=rf"{ME}.jsonl:2: is damaged"):
        job_files.read(at, "2")


def later(job: JobSummary, **changes: object) -> dict[str, object]:
    """The line of a later release of the same version: it has further keys, also in its records."""
    value = {**job.as_json(), "carbon": {"kg": 1.5}, **changes}
    value["job"] = {**value["job"], "queue_s": 4.0}
    uses = (("network", None), ("cpu", "throttled"), ("memory", "not-recorded"))
    value["uses"] = [
        {"key": key, "share": None, "used": None, "total": None, "unit": "%", "reason": reason, "note": "", "peak": 1}
        for key, reason in uses
    ]
    return value


def test_keys_of_a_later_release_are_ignored(site: Path) -> None:
    """Login nodes are upgraded last: a use that this release does not know is left out, its reason not explained."""
    at = write(site, more=json.dumps(later(summary(1))) + "\n")
    read = job_files.read(at, "1")
    assert replace(read, uses=()) == summary(1)
    assert [job_text.amount(use) for use in read.uses] == [
        "unknown: for a reason of a later release",
        "unknown: not recorded in accounting",
    ]


def test_version_of_a_later_release_is_named(site: Path) -> None:
    """One line says what to do; jobs in a known version are read."""
    at = write(site, summary(1), more=json.dumps(later(summary(2), version=2, uses="changed")) + "\n")
    assert job_files.read(at, "1").job.job_id == 1
    with pytest.raises(InputError, match=rf"{ME}.jsonl:2: has version 2 of the format; this release reads 1") as error:
        job_files.read(at, "2")
    assert error.value.hint == "upgrade slurm-affinode on this machine"


@only_root
def test_publication_keeps_lines_of_a_later_release(site: Path) -> None:
    """After a downgrade of the report machine they are published as they are."""
    publish(site, summary(1))
    line = json.dumps(later(summary(1))) + "\n"
    (site / "copies" / "4711.jsonl").write_text(line)
    publish(site, summary(2, days=2))
    assert line in (site / "jobs" / "4711.jsonl").read_text()


@only_root
def test_published_summary_has_keys_of_release_0_9_only(site: Path) -> None:
    """Its readers refuse others; a line in AdminComment is published all the same."""
    publish(site, summary(1), replace(summary(2, days=2), admin_comment="gpu 10 %"))
    first, second = ((site / "jobs" / "4711.jsonl").read_text()).splitlines()
    assert json.loads(first)["admin_comment"] == "gpu 10 %"
    assert "admin_comment" not in json.loads(second)


def test_reader_trusts_no_other_file(site: Path) -> None:
    """A link, a FIFO, a file that others may write or that belongs to another user."""
    at = write(site, summary(1))
    path = at / f"{ME}.jsonl"
    path.chmod(0o622)
    with pytest.raises(InputError, match="others may write to it"):
        job_files.read(at, "1")
    path.rename(at / "real")
    path.symlink_to(at / "real")
    with pytest.raises(InputError, match="cannot be read"):
        job_files.read(at, "1")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="it is not a regular file"):
        job_files.read(at, "1")
    path.unlink()
    if ME == 0:
        write(site, summary(1))
        os.chown(path, 4711, -1)
        with pytest.raises(InputError, match="it belongs to UID 4711"):
            job_files.read(at, "1")


def test_user_without_file_has_one_clear_line(site: Path) -> None:
    """Exit status 1: the job is not known, whatever the reason."""
    with pytest.raises(NoSummaryError, match="no summaries of your jobs are published yet") as error:
        job_files.read(site / "jobs", "1")
    assert error.value.exit_code == 1
