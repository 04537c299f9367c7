"""The write-ahead journal: complete records survive a crash, torn ones are discarded."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.model.suspension import JobKey, Phase, SuspendOption
from slurm_affinode.suspension.records.journal import Journal, JournalError, parse
from slurm_affinode.suspension.records.record import SuspensionFacts

KEY = JobKey("alpha", 12, 1_700_000_000)
FIRST = SuspensionFacts(
    restarts=0, uid=2001, gid=100, option=SuspendOption(), began_epoch=999.5, init_pid=5, init_started=6
)
"""The facts that the first line of each journal has."""


@pytest.fixture
def journal(tmp_path):
    times = iter(range(1000, 2000))
    return Journal(tmp_path / "journal", clock=lambda: float(next(times)))


def test_written_records_are_read_again(journal):
    """Phase, facts and times of every step are read; later facts replace earlier ones."""
    record = journal.of_job(KEY)
    record.write(Phase.LOCKING, replace(FIRST, cuda_pids=(7,), seq=1))
    record.write(Phase.LOCKED, SuspensionFacts(seq=2))
    again = journal.of_job(KEY)
    assert (again.phase, again.record.cuda_pids, again.record.seq, again.record.phases) == (
        Phase.LOCKED, (7,), 2, {"locking": 1000.0, "locked": 1001.0},
    )  # fmt: skip
    assert again.record == record.record
    assert again.path.stat().st_mode & 0o777 == 0o600


def test_job_without_journal_is_running(journal):
    assert journal.of_job(KEY).phase is Phase.RUNNING
    assert journal.open_journals() == []


def test_torn_last_line_is_overwritten(journal):
    """The next record starts at the offset of the torn one."""
    record = journal.of_job(KEY)
    record.write(Phase.LOCKING)
    with record.path.open("ab") as file:
        file.write(b'{"version":1,"phase":"dum')
    again = journal.of_job(KEY)
    assert (again.phase, again.damage) == (Phase.LOCKING, None)
    again.write(Phase.LOCKED)
    assert [entry.phase for entry in journal.of_job(KEY).entries] == [Phase.LOCKING, Phase.LOCKED]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"version":2,"phase":"locked","time":1.0,"facts":{}}\n', "version 2, not 1"),
        (b'{"version":1,"phase":"moving","time":1.0,"facts":{}}\n', "'moving' is not a valid Phase"),
        (b'{"version":1,"phase":"locked","time":1.0,"facts":[]}\n', "facts are not a table"),
        (b'{"version":1,"phase":"locked","time":1.0,"facts":{"uid":"0"}}\n', "'0' is not of type int"),
    ],
)
def test_record_of_another_release_is_reported_and_kept(journal, line, why):
    """It is complete: its step was carried out, so the records before it are obsolete."""
    record = journal.of_job(KEY)
    record.write(Phase.LOCKING)
    with record.path.open("ab") as file:
        file.write(line)
    before = record.path.read_bytes()
    again = journal.of_job(KEY)
    assert (again.phase, again.entries, again.unreadable) == (Phase.RUNNING, [], True)
    assert again.damage == f"line 2 was written by another release of slurm-affinode ({why}): its job is left alone"
    with pytest.raises(JournalError, match=r"alpha\.12\.1700000000\.jsonl: line 2 was written by another release"):
        again.write(Phase.LOCKING)
    assert record.path.read_bytes() == before


def test_journal_that_is_not_of_a_suspension_is_reported(journal):
    journal.of_job(KEY).write(Phase.LOCKING, SuspensionFacts(uid=2001))
    with pytest.raises(
        JournalError, match=r"1700000000\.jsonl: is not the journal of a suspension: restarts is missing"
    ):
        _ = journal.of_job(KEY).record


def test_facts_of_a_later_release_are_ignored():
    line = b'{"version":1,"phase":"locking","time":1.0,"facts":{"uid":2001,"later":[1]}}\n'
    entries, _, damage = parse(line)
    assert ([entry.facts for entry in entries], damage) == ([SuspensionFacts(uid=2001)], None)


def test_damage_is_reported_and_records_before_it_count(journal):
    record = journal.of_job(KEY)
    record.write(Phase.LOCKING)
    record.write(Phase.LOCKED)
    record.write(Phase.PARKED)
    lines = record.path.read_bytes().splitlines(keepends=True)
    record.path.write_bytes(lines[0] + b"\0" * len(lines[1].rstrip()) + b"\n" + lines[2])
    again = journal.of_job(KEY)
    assert again.phase is Phase.LOCKING
    assert "line 2" in (again.damage or "")


def test_closed_records_are_not_listed(journal, tmp_path):
    other = JobKey("alpha", 3, 5)
    journal.of_job(KEY).write(Phase.LOCKING)
    journal.of_job(other).write(Phase.RESTORING)
    (tmp_path / "journal" / "README").write_text("not a journal")
    assert [record.key for record in journal.open_journals()] == [other, KEY]
    journal.of_job(other).close()
    assert [record.key for record in journal.open_journals()] == [KEY]
    journal.of_job(other).close()


def test_reused_job_id_has_its_own_journal(journal):
    journal.of_job(KEY).write(Phase.LOCKING)
    assert journal.of_job(JobKey("alpha", 12, 1_700_000_001)).phase is Phase.RUNNING


def test_full_disk_leaves_journal_unchanged(journal, monkeypatch):
    """The error names the file; the journal is unchanged."""
    record = journal.of_job(KEY)
    record.write(Phase.LOCKING)

    def full(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JournalError, match="No space left"):
            record.write(Phase.LOCKED)
    assert record.phase is Phase.LOCKING
    assert journal.of_job(KEY).phase is Phase.LOCKING
    record.write(Phase.LOCKED)
    assert journal.of_job(KEY).phase is Phase.LOCKED


def test_symbolic_link_is_not_followed(journal, tmp_path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "alpha.12.1700000000.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError):
        journal.of_job(KEY).write(Phase.LOCKING)


@given(st.binary(max_size=60), st.integers(0, 300))
@example(b"0\n", 162)
def test_arbitrary_bytes_are_parsed_without_error(noise, cut):
    """Complete lines before the damage are found, unless a line was written by another release."""
    line = b'{"version":1,"phase":"locking","time":1.0,"facts":{}}\n'
    entries, end, damage = parse((line * 3)[:cut] + noise)
    assert end <= cut + len(noise)
    assert len(entries) >= min(3, cut // len(line)) or "another release" in damage


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_journal_writable_by_others_is_rejected(tmp_path, mode):
    """Write access to the journal would allow users to have root kill any process."""
    directory = tmp_path / "journal"
    directory.mkdir()
    directory.chmod(mode)
    journal = Journal(directory)
    with pytest.raises(JournalError, match="users other than"):
        journal.open_journals()
    with pytest.raises(JournalError, match="users other than"):
        journal.of_job(JobKey("alpha", 7, 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_journal_of_another_user_is_rejected(tmp_path):
    (tmp_path / "journal").mkdir(mode=0o700)
    os.chown(tmp_path / "journal", 12345, 12345)
    with pytest.raises(JournalError, match="it belongs to user 12345"):
        Journal(tmp_path / "journal").open_journals()
