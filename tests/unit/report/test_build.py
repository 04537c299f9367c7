"""Writing the report: whole files or none, and clear words when it cannot be."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from slurm_affinode import files
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.errors import AffinodeError
from slurm_affinode.report import build


def test_a_report_is_a_page_and_a_summary(tmp_path: Path, result: WasteResult) -> None:
    """The directory is made; the paths come back."""
    out = tmp_path / "deep" / "out"
    written = build.write_report(result, out)
    assert sorted(p.name for p in out.iterdir()) == ["report.html", "summary.json"]
    assert written.report == out / "report.html"
    assert json.loads(written.summary_path.read_text(encoding="utf-8"))["title"] == "GPU waste report"
    assert written.csv == ()


def test_csv_files_are_written_when_asked_for(tmp_path: Path, result: WasteResult) -> None:
    """And the page names the file that has all jobs."""
    written = build.write_report(result, tmp_path, csv=True)
    assert tmp_path / "jobs.csv" in written.csv
    assert all(path.exists() for path in written.csv)


def test_a_second_report_replaces_the_first(tmp_path: Path, result: WasteResult) -> None:
    """Nothing else is left behind."""
    build.write_report(result, tmp_path, title="One")
    build.write_report(result, tmp_path, title="Two")
    assert "<h1>Two</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "summary.json"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path, result: WasteResult) -> None:
    """It stays as it was."""
    taken = tmp_path / "out"
    taken.write_text("mine", encoding="utf-8")
    with pytest.raises(AffinodeError, match="is not a directory"):
        build.write_report(result, taken)
    with pytest.raises(AffinodeError, match="is not a directory"):
        build.write_report(result, taken / "below")
    assert taken.read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, result: WasteResult) -> None:
    """With the reason."""
    tmp_path.chmod(0o500)
    with pytest.raises(AffinodeError, match="permission denied"):
        build.write_report(result, tmp_path)


def test_a_full_disk_leaves_nothing_of_a_new_report(
    tmp_path: Path, result: WasteResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the files that fitted, nor the directories that were made for them; a directory that was there stays."""
    write, left = files.os.fsync, [3]

    def filling_up(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd)

    monkeypatch.setattr(files.os, "fsync", filling_up)
    (tmp_path / "there").mkdir()
    with pytest.raises(AffinodeError, match="no space left on device"):
        build.write_report(result, tmp_path / "there" / "year" / "week", csv=True)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["there"]


def test_a_file_of_the_site_that_lies_there_stays(tmp_path: Path, result: WasteResult) -> None:
    """Whatever it is called."""
    (tmp_path / ".probe").write_text("mine", encoding="utf-8")
    build.write_report(result, tmp_path)
    assert (tmp_path / ".probe").read_text(encoding="utf-8") == "mine"


def test_a_full_disk_leaves_the_old_report_whole(
    tmp_path: Path, result: WasteResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing half-written."""
    build.write_report(result, tmp_path, title="Old")
    before = (tmp_path / "report.html").read_bytes()

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(AffinodeError, match="no space left on device") as caught:
        build.write_report(result, tmp_path, title="New")
    assert "full" in (caught.value.hint or "")
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "summary.json"]
