"""Writing a history: atomic, by several at once, while others read; what is damaged is said."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from stored_history import files, values

from slurm_affinode.errors import AffinodeError, DiskError, UnreachableError
from slurm_affinode.history import compact, manifest, writer
from slurm_affinode.history.identity import with_device
from slurm_affinode.history.partfiles import PartFiles
from slurm_affinode.history.parts import PartWriter
from slurm_affinode.history.store import SampleStore
from slurm_affinode.history.writer import Source

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Samples = Callable[..., pl.DataFrame]


def test_several_parts_of_a_day_are_merged_while_they_are_read(store: SampleStore, samples: Samples) -> None:
    """Between landing and compaction a reader sees the same as afterwards."""
    seen: list[list[object]] = []

    def landed(_: object) -> None:
        seen.append([*values(SampleStore(store.root)), [p.single for p in store.parts()]])

    with writer.Writer(store.root, on_landed=landed, rows_at_once=1) as session:
        session.add([samples([1.0, 2.0])], Source("a"))
        session.add([samples([None, 3.0, 4.0], power_w=9.0)], Source("b"))
    assert seen == [[1.0, 2.0, [True]], [1.0, 3.0, 4.0, [False, False]]]
    store.close()
    assert values(store) == [1.0, 3.0, 4.0]
    assert values(store, "power_w") == [9.0, 9.0, 9.0]


def test_a_source_that_breaks_off_leaves_nothing_and_the_others_stay(store: SampleStore, samples: Samples) -> None:
    """Also where a part of it was already written."""

    def broken():  # type: ignore[no-untyped-def]
        yield samples([1.0, 2.0])
        yield samples([3.0], start=EIGHT + timedelta(hours=1))
        raise RuntimeError("cut off")

    with writer.Writer(store.root, rows_at_once=2) as session:
        session.add([samples([9.0], uuid="GPU-9")], Source("good"))
        with pytest.raises(RuntimeError):
            session.add(broken(), Source("bad"))
        session.add([samples([8.0], uuid="GPU-8")], Source("good too"))
    assert sorted(store.scan().collect()["uuid"]) == ["GPU-8", "GPU-9"]


def test_leaving_a_writer_by_an_exception_lands_nothing(store: SampleStore, samples: Samples) -> None:
    """What had not landed is gone, staging included."""

    def interrupted() -> None:
        with store.writer() as session:
            session.add([samples([1.0])], Source("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert store.days() == []
    assert list((store.root / "staging").iterdir()) == []


def test_a_crash_between_moving_parts_and_the_manifest_changes_nothing(
    store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old manifest stays true; the files that it does not name are swept by the next writer."""
    store.ingest(samples([1.0]), source="a")
    before = files(store)

    def crash(*_: object) -> None:
        raise RuntimeError("power loss")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "save", crash)
        with pytest.raises(RuntimeError):
            store.ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert values(store) == [1.0]
    assert files(store) > before
    store.close()
    store.ingest(samples([3.0], uuid="GPU-3"), source="c")
    store.close()
    store.ingest(samples([3.0], uuid="GPU-3"), source="c")
    assert len(files(store)) == 3
    assert values(store, "uuid") != []


def test_the_staging_of_a_writer_that_died_is_removed(store: SampleStore, samples: Samples) -> None:
    """A lock file that nobody holds tells a dead writer."""
    dead = store.root / "staging" / "dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "part-x.parquet").write_bytes(b"half")
    store.ingest(samples([1.0]), source="a")
    assert not dead.exists()


def test_a_reader_keeps_its_parts_while_another_compacts(store: SampleStore, samples: Samples) -> None:
    """A plan that was made before a compaction still runs; the files go with the write after the reader."""
    store.ingest(samples([1.0]), source="a")
    plan = store.scan()
    SampleStore(store.root).ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert plan.collect()["util_pct"].to_list() == [1.0]
    assert len(files(store)) == 9
    store.close()
    SampleStore(store.root).ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert len(files(store)) == 3


def _write_many(root: str, node: str) -> None:
    frames = [
        pl.DataFrame(
            {"cluster": ["a"] * 20, "node": [node] * 20, "uuid": [f"GPU-{gpu}"] * 20,
             "time": [EIGHT + timedelta(seconds=n) for n in range(20)], "util_pct": [1.0] * 20}
        )
        for gpu in range(5)
    ]  # fmt: skip
    for number, frame in enumerate(frames):
        SampleStore(Path(root)).ingest(frame, source=f"{node}-{number}")


def test_two_processes_may_write_at_once(store: SampleStore) -> None:
    """Nothing is lost, nothing is doubled, the day ends as one part."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(str(store.root), f"gpu0{n}")) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    whole = store.scan().collect()
    assert len(whole) == 200
    assert whole.select("node", "uuid", "time").is_unique().all()
    store.close()
    store.compact()
    assert len(files(store)) == 3


def test_a_part_needs_samples_and_identities(tmp_path: Path) -> None:
    """Faults of a caller leave no files behind."""
    ids = with_device(pl.DataFrame({"cluster": "a", "node": "n1", "uuid": ["GPU-1"]}))
    with pytest.raises(ValueError, match="at least one"), PartWriter(PartFiles.of(tmp_path, "x"), "x", ids) as part:
        part.write(pl.DataFrame({"device": [], "time": []}))
    frame = pl.DataFrame({"device": pl.Series([1], dtype=pl.UInt64), "time": [EIGHT]})
    with pytest.raises(ValueError, match="no identity"), PartWriter(PartFiles.of(tmp_path, "x"), "x", ids) as part:
        part.write(frame)
    assert list(tmp_path.iterdir()) == []


def test_compaction_goes_through_a_large_day_in_ranges_of_devices(
    store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on how much is read at once."""
    monkeypatch.setattr(compact.compact, "__kwdefaults__", {"rows_at_once": 7})
    frames = [samples([float(n), None, float(n)], uuid=f"GPU-{n}", job=str(n)) for n in range(6)]
    with writer.Writer(store.root, rows_at_once=1) as session:
        for number, frame in enumerate([*frames, *frames[::2]]):
            session.add([frame], Source(str(number)))
    whole = store.scan().collect().sort("uuid", "time")
    assert whole["util_pct"].to_list() == [x for n in range(6) for x in (n, None, n)]
    assert len(files(store)) == 3


def test_a_damaged_manifest_and_damaged_tables_are_one_line_each(store: SampleStore, samples: Samples) -> None:
    """Naming the file and what to do."""
    store.ingest(samples([1.0]), source="a")
    (part,) = store.parts()
    part.files.devices.write_bytes(b"no parquet")
    with pytest.raises(UnreachableError, match="devices-"):
        part.devices()
    path = store.root / manifest.FILE
    good = json.loads(path.read_text())
    for text, what in [
        ("{", "damaged"),
        (json.dumps({**good, "version": 99}), "version 99"),
        (json.dumps({**good, "days": {"2026-11-01": [{"name": "../x"}]}}), "damaged"),
        (json.dumps({**good, "days": {"2026-11-01": [{**good["days"]["2026-11-01"][0], "name": "../x"}]}}), "damaged"),
    ]:
        path.write_text(text)
        with pytest.raises(AffinodeError, match=what):
            store.days()


def test_samples_without_a_manifest_are_kept_and_told(store: SampleStore, samples: Samples) -> None:
    """As a backup that was restored in part has them: nothing is read, written or swept. A new history has it first."""
    store.ingest(samples([1.0]), source="a")
    there = files(store)
    path = store.root / manifest.FILE
    good = path.read_text()
    path.unlink()
    for touch in (
        store.days,
        lambda: store.ingest(samples([2.0]), source="b"),
        lambda: store.delete_before(EIGHT.date()),
    ):
        with pytest.raises(AffinodeError, match=r"manifest\.json: is missing, and there are samples \(day="):
            touch()
    assert files(store) == there
    path.write_text(good)
    assert len(store.scan().collect()) == 1


def test_a_first_ingest_that_is_cut_off_leaves_no_samples_without_a_manifest(
    tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its part was moved: the next one sweeps it."""
    store = SampleStore(tmp_path / "history")
    with monkeypatch.context() as patch:
        patch.setattr(writer.Manifest, "with_parts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.ingest(samples([1.0]), source="a")
    assert files(store)
    assert store.days() == []
    store.ingest(samples([2.0]), source="b")
    assert store.scan().collect()["util_pct"].to_list() == [2.0]


def test_a_disk_that_is_full_at_the_last_small_table_is_one_line(
    tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is of a file that Polars writes, which says so in its own words; another fault of it stays what it is."""
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda _, content: write(Path("/dev/full"), content))
    store = SampleStore(tmp_path / "history")
    with pytest.raises(DiskError, match=r"history: cannot be written: No space left on device$"):
        store.ingest(samples([1.0]), source="a")
    assert store.days() == []
    with pytest.raises(DiskError, match=r"No space left on device$"), writer.writing(tmp_path):
        pl.DataFrame({"a": [1]}).write_parquet("/dev/full")
    with pytest.raises(pl.exceptions.ComputeError), writer.writing(tmp_path):
        raise pl.exceptions.ComputeError("something else")


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path, samples: Samples) -> None:
    """Naming the directory."""
    (tmp_path / "file").touch()
    with pytest.raises(UnreachableError, match="cannot be written"):
        SampleStore(tmp_path / "file" / "history").ingest(samples([1.0]), source="a")
    assert SampleStore(tmp_path / "file" / "history").days() == []
