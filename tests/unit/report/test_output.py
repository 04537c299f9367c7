"""Writing reports: complete files or none, and clear errors."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base import files
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.report import output


def test_report_consists_of_page_and_summary(tmp_path: Path, result: WasteResult) -> None:
    """The directory is created; the paths are returned."""
    out = tmp_path / "deep" / "out"
    written = output.write_report(result, out)
    assert sorted(p.name for p in out.iterdir()) == ["report.html", "summary.json"]
    assert written.report == out / "report.html"
    assert json.loads(written.summary_path.read_text(encoding="utf-8"))["title"] == "GPU waste report"
    assert written.csv == ()


def test_csv_files_are_written_on_request(tmp_path: Path, result: WasteResult) -> None:
    written = output.write_report(result, tmp_path, csv=True)
    assert tmp_path / "jobs.csv" in written.csv
    assert all(path.exists() for path in written.csv)


def test_new_report_replaces_the_old_one(tmp_path: Path, result: WasteResult) -> None:
    """No other files remain."""
    output.write_report(result, tmp_path, title="One")
    output.write_report(result, tmp_path, title="Two")
    assert "<h1>Two</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "summary.json"]


def test_file_in_place_of_the_directory_is_rejected(tmp_path: Path, result: WasteResult) -> None:
    """The file is not changed."""
    taken = tmp_path / "out"
    taken.write_text("mine", encoding="utf-8")
    with pytest.raises(AffinodeError, match="is not a directory"):
        output.write_report(result, taken)
    with pytest.raises(AffinodeError, match="is not a directory"):
        output.write_report(result, taken / "below")
    assert taken.read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_directory_is_reported(tmp_path: Path, result: WasteResult) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AffinodeError, match="permission denied"):
        output.write_report(result, tmp_path)


def test_full_disk_leaves_no_part_of_a_new_report(
    tmp_path: Path, result: WasteResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written files and created directories are removed; directories that existed before remain."""
    write, left = files.os.fsync, [3]

    def filling_up(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd)

    monkeypatch.setattr(files.os, "fsync", filling_up)
    (tmp_path / "there").mkdir()
    with pytest.raises(AffinodeError, match="no space left on device"):
        output.write_report(result, tmp_path / "there" / "year" / "week", csv=True)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["there"]


def test_other_files_in_the_directory_are_kept(tmp_path: Path, result: WasteResult) -> None:
    (tmp_path / ".probe").write_text("mine", encoding="utf-8")
    output.write_report(result, tmp_path)
    assert (tmp_path / ".probe").read_text(encoding="utf-8") == "mine"


def test_full_disk_leaves_the_old_report_intact(
    tmp_path: Path, result: WasteResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.write_report(result, tmp_path, title="Old")
    before = (tmp_path / "report.html").read_bytes()

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(AffinodeError, match="no space left on device") as caught:
        output.write_report(result, tmp_path, title="New")
    assert "full" in (caught.value.hint or "")
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "summary.json"]
