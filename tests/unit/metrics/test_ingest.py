"""File ingest: every file is ingested completely or not at all, and a bad file does not stop the others."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.errors import DiskError
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import FileOutcome, IngestSummary, ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadOptions

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
OPTIONS = ReadOptions(aliases=aliases.load(), default_cluster="alpha", zone=UTC)
LINE = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n1"} 5 1793520000000\n'


@pytest.fixture
def site(tmp_path: Path, recorded: Path) -> Path:
    """Return a directory as found at sites: valid files in folders, notes, hidden files and duplicates."""
    root = tmp_path / "site"
    (root / "gpu01").mkdir(parents=True)
    (root / "dcgm").mkdir()
    shutil.copy(recorded / "gpu" / "nvidia-smi-gpu01.csv", root / "gpu01" / "smi.csv")
    shutil.copy(recorded / "gpu" / "dcgm-exporter.prom", root / "dcgm" / "a.prom")
    shutil.copy(recorded / "gpu" / "dcgm-exporter.prom", root / "dcgm" / "same-again.prom")
    (root / "README.md").write_text("what this is")
    (root / ".hidden").write_text("x")
    return root


def take(store: SampleStore, *paths: Path | str, **how: Any) -> IngestSummary:
    """Ingest with the options of these tests."""
    return ingest_files(store, paths, how.pop("options", OPTIONS), **how)


def test_directory_is_ingested_completely(store: SampleStore, site: Path) -> None:
    """The summary gives files, samples, duplicates, devices, nodes, time span and sampling intervals."""
    summary = take(store, site)
    assert [(Path(file.path).name, file.status, file.format, file.samples) for file in summary.files] == [
        ("a.prom", "taken", "prometheus", 6),
        ("same-again.prom", "taken", "prometheus", 6),
        ("smi.csv", "taken", "nvidia-smi", 6),
    ]
    assert (summary.samples, summary.new, summary.duplicates) == (18, 12, 6)
    assert (summary.devices, summary.nodes) == (3, 1)
    assert summary.first == EIGHT
    assert sum(devices for _, devices in summary.steps_s) == 3
    assert (summary.failed, summary.problem_count, summary.dry_run) == ((), 0, False)
    assert len(store.scan().collect()) == 12


def test_known_files_are_skipped(store: SampleStore, site: Path) -> None:
    """Files are known by content and read options; ``again`` reads them again and is a no-op."""
    before = take(store, site)
    summary = take(store, site)
    assert {file.status for file in summary.files} == {"known"}
    assert (summary.samples, summary.new, summary.first) == (0, 0, None)
    again = take(store, site, again=True)
    assert (again.samples, again.new) == (before.samples, 0)
    other = take(store, site, options=replace(OPTIONS, cluster="beta"))
    assert (other.samples, other.new) == (18, 12)


def test_grown_file_adds_only_new_samples(store: SampleStore, tmp_path: Path) -> None:
    """A log that is appended to is read completely, and its samples are counted once."""
    path = tmp_path / "m.prom"
    path.write_text(LINE)
    take(store, path)
    path.write_text(LINE + LINE.replace("1793520000000", "1793520030000"))
    summary = take(store, path)
    assert (summary.samples, summary.new, summary.duplicates) == (2, 1, 1)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("empty.csv", b"", "is empty"),
        ("image.png", b"\x89PNG\r\n\x1a\n\x00\x00", "binary file"),
        ("diary.txt", b"dear diary\n", "no known format"),
        ("cut.prom", LINE.encode() + LINE[:40].encode(), "cut off"),
        ("digits.prom", LINE.encode() + LINE[:-7].encode(), "cut off"),
        ("cpu.prom", b'node_cpu_seconds_total{cpu="0"} 1 1793520000000\n', "no GPU metric that is known"),
        ("nodes.prom", LINE.replace('Hostname="n1"', 'a="b"').encode(), "none of its 1 samples can be used"),
        ("wrong.csv", b"1793520000,GPU-1,5\n1793520030,GPU-1,6\n", "no known format"),
    ],
)
def test_unusable_file_is_rejected(store: SampleStore, tmp_path: Path, name: str, content: bytes, what: str) -> None:
    """The error is one line that names the file; the other files are ingested."""
    (tmp_path / "in").mkdir()
    bad, good = tmp_path / "in" / name, tmp_path / "in" / "zz.prom"
    bad.write_bytes(content)
    good.write_text(LINE)
    summary = take(store, tmp_path / "in")
    (failed,) = summary.failed
    assert failed.error is not None
    assert failed.error.startswith(str(bad))
    assert what in failed.error
    assert "\n" not in failed.error
    assert store.scan().collect()["node"].to_list() == ["n1"]


def test_bad_lines_are_reported_or_reject_the_file_if_strict(store: SampleStore, tmp_path: Path) -> None:
    """Without ``strict``, the valid lines of the file are ingested."""
    path, other = tmp_path / "m.prom", tmp_path / "n.prom"
    path.write_text(LINE + LINE.replace("} 5", "} five") + "# a comment\n")
    other.write_text(LINE.replace("GPU-1", "GPU-2"))
    summary = take(store, path, other, options=replace(OPTIONS, strict=True))
    assert [file.status for file in summary.files] == ["failed", "taken"]
    assert store.devices()["uuid"].to_list() == ["GPU-2"]
    summary = take(store, path, other)
    (problem,) = summary.files[0].problems
    assert (problem.line, problem.reason.partition(":")[0]) == (2, "has a value that is not a number")
    assert summary.problem_count == 1
    assert summary.failed == ()


def test_dry_run_stores_nothing(store: SampleStore, site: Path) -> None:
    """It reads and reports all files, including known ones."""
    summary = take(store, site, dry_run=True)
    assert (summary.samples, summary.new, summary.dry_run) == (18, 0, True)
    assert summary.files[0].first == EIGHT
    assert not store.root.exists()


def test_paths_are_files_directories_and_globs(tmp_path: Path) -> None:
    """Each file is listed once, in order; patterns and paths without files are reported."""
    for name in ("a1.csv", "a2.csv", "b1.csv", "c/d.csv", "c/.x", "c/notes.md", "c/README", "e/f.tmp"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    result, missing = inputs.expand([f"{tmp_path}/a*.csv", tmp_path / "a1.csv", tmp_path / "c", f"{tmp_path}/**/b*"])
    assert [path.relative_to(tmp_path).as_posix() for path in result] == ["a1.csv", "a2.csv", "c/d.csv", "b1.csv"]
    assert missing == []
    os.mkfifo(tmp_path / "pipe")
    _, missing = inputs.expand([tmp_path / "none", f"{tmp_path}/z*", tmp_path / "e", tmp_path / "pipe"])
    assert [why.split(";")[0] for _, why in missing] == [
        "no such file or directory", "no file matches", "the directory has no files", "is no regular file",
    ]  # fmt: skip


def test_glob_with_directory_links_and_unreadable_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file found by several paths is listed once; unreadable directories are reported, empty ones are not."""
    for name in ("in", "closed", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "a.csv").write_text("x")
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    (tmp_path / "in" / "n1.csv").symlink_to("a.csv")
    walk = os.walk

    def refused(top: Path, onerror: Callable[[OSError], object]) -> Iterator[tuple[str, list[str], list[str]]]:
        if Path(top).name == "closed":
            onerror(PermissionError(13, "Permission denied", str(top)))
            return
        yield from walk(top)

    monkeypatch.setattr(os, "walk", refused)
    result, missing = inputs.expand([f"{tmp_path}/**/*.csv", f"{tmp_path}/[ce]*"])
    assert [path.relative_to(tmp_path) for path in result] == [Path("in/a.csv"), Path("in/n1.csv")]
    assert missing == [(f"{tmp_path}/closed", "cannot be read: permission denied")]
    assert inputs.expand([f"{tmp_path}/emp*"]) == ([], [(f"{tmp_path}/emp*", "no file matches")])


def test_unreadable_paths_are_reported_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a name that is too long, and a directory without permission next to a readable file."""
    (tmp_path / "in" / "closed").mkdir(parents=True)
    (tmp_path / "in" / "a.csv").touch()
    scandir = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    long = f"{tmp_path}/{'x' * 300}"
    result, missing = inputs.expand([long, tmp_path / "in"])
    assert result == [tmp_path / "in" / "a.csv"]
    assert missing == [
        (long, "cannot be read: file name too long"),
        (str(tmp_path / "in" / "closed"), "cannot be read: permission denied"),
    ]


def test_missing_path_is_reported(store: SampleStore, tmp_path: Path) -> None:
    """It counts as a failed file."""
    summary = take(store, tmp_path / "none.csv")
    assert [item.error for item in summary.failed] == [f"{tmp_path / 'none.csv'}: no such file or directory"]
    assert not store.root.exists()


def test_files_are_reported_when_durable(store: SampleStore, site: Path) -> None:
    """This includes the last file; each outcome is complete."""
    heard: list[FileOutcome] = []
    sizes: list[int] = []
    take(store, site, on_landed=heard.extend, advance=sizes.append)
    assert sorted(Path(item.path).name for item in heard) == ["a.prom", "same-again.prom", "smi.csv"]
    assert all(item.finished is not None and item.samples == 6 for item in heard)
    assert sum(sizes) == sum(path.stat().st_size for path in site.rglob("*.[pc]*"))
    heard.clear()
    take(store, site, on_landed=heard.extend)
    assert heard == []


def test_interrupted_ingest_of_small_files_continues(
    store: SampleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are committed while others are read; a second run reads the others."""
    monkeypatch.setattr("slurm_affinode.metrics.parquet.writer.SOURCES_AT_ONCE", 2)
    directory = tmp_path / "in"
    directory.mkdir()
    for number in range(7):
        (directory / f"{number}.prom").write_text(LINE.replace("GPU-1", f"GPU-{number}"))
    (directory / "5.prom").write_text("no metric")
    landed: list[FileOutcome] = []

    def interrupted(_: int) -> None:
        if len(landed) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(store, directory, on_landed=landed.extend, advance=interrupted)
    assert [Path(item.path).name for item in landed] == ["0.prom", "1.prom", "2.prom", "3.prom"]
    summary = take(store, directory)
    assert [file.status for file in summary.files] == ["known"] * 4 + ["taken", "failed", "taken"]
    assert "5.prom" in str(summary.failed[0].error)
    assert (summary.new, len(store.scan().collect())) == (2, 6)


def test_full_disk_stops_the_ingest(store: SampleStore, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not at fault: the ingest stops with one line and leaves the stored samples unchanged."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slurm_affinode.metrics.parquet.directory.move_part", full)
    with pytest.raises(DiskError, match="No space left"):
        take(store, site)
    assert store.days() == []


def test_large_file_is_committed_at_once(
    store: SampleStore, samples: Callable[..., pl.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written in several parts; files that wait before it are committed first."""
    monkeypatch.setattr(
        "slurm_affinode.metrics.parquet.writer.StoreWriter.__init__.__kwdefaults__",
        {"on_landed": None, "rows_at_once": 3},
    )
    monkeypatch.setattr("slurm_affinode.metrics.readers.parquet_table.ROWS_AT_ONCE", 2)
    small, large = tmp_path / "a.parquet", tmp_path / "b.parquet"
    samples([9.0], uuid="GPU-9").write_parquet(small)
    samples([1.0, 2.0, 3.0, 4.0, 5.0]).write_parquet(large)
    summary = take(store, small, large)
    assert (summary.samples, summary.new) == (6, 6)
    assert store.devices()["rows"].sort().to_list() == [1, 5]


def test_values_that_a_device_cannot_measure_are_not_used(store: SampleStore, tmp_path: Path) -> None:
    """The utilization 0 of a MIG instance, and the profiling fields of a virtual GPU; the summary counts them."""

    def line(name: str, labels: str, value: float) -> str:
        return f'{name}{{gpu="0",UUID="GPU-1",Hostname="n1",{labels}}} {value} 1793520000000\n'

    util, engine = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
    instance, virtual = 'GPU_I_ID="3"', 'modelName="NVIDIA A40-48Q"'
    path = tmp_path / "m.prom"
    path.write_text("".join(
        line(name, labels, value)
        for labels in (instance, virtual) for name, value in ((util, 0), (engine, 0), ("DCGM_FI_DEV_FB_USED", 5))
    ))  # fmt: skip
    summary = take(store, path)
    rows = store.scan().sort("mig").select("mig", "util_pct", "engine_active", "fb_used_mib").collect()
    assert rows.rows() == [(None, 0.0, None, 5.0), ("3", None, 0.0, 5.0)]
    assert dict(summary.files[0].decisions) == {
        "MIG instances do not measure util_pct: its values are not used": 1,
        "virtual GPUs do not measure engine_active: its values are not used": 1,
    }


def test_files_read_at_the_same_time_have_the_same_outcome(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes, their order, messages and samples do not depend on the number of threads, nor do those of bad files."""
    monkeypatch.setattr("slurm_affinode.metrics.ingest._FILES_AT_ONCE", 2)
    for at in range(12):
        line = LINE.replace("GPU-1", f"GPU-{at}")
        (site / f"m{at:02}.prom").write_text(line + ("?\n" if at % 3 == 0 else "") + (line[:20] if at % 5 == 0 else ""))

    def outcome(cores: int) -> tuple[list[FileOutcome], list[str], int, list[tuple[Any, ...]]]:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        store = SampleStore(tmp_path / f"history{cores}")
        landed: list[str] = []
        sizes: list[int] = []
        summary = take(
            store, site, on_landed=lambda files: landed.extend(file.path for file in files), advance=sizes.append
        )
        files = [replace(file, started=None, finished=None) for file in summary.files]
        return files, landed, sum(sizes), sorted(store.scan().collect().rows(), key=repr)

    expected = outcome(1)
    assert len(expected[0]) == 15
    assert {check.status for check in expected[0]} == {"taken", "failed"}
    assert outcome(8) == expected


def test_interrupted_ingest_leaves_no_thread(store: SampleStore, site: Path) -> None:
    """The files that are read ahead are given up."""
    before = threading.enumerate()

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(store, site, advance=interrupt)
    assert threading.enumerate() == before
    assert store.days() == []
