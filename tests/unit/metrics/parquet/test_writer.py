"""Writing samples: atomic, with concurrent writers and readers; damage is reported."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from slurm_affinode.base.errors import AffinodeError, DiskError, UnreachableError
from slurm_affinode.base.object_url import StorePlace
from slurm_affinode.metrics.identity import with_device
from slurm_affinode.metrics.parquet import manifest, writer
from slurm_affinode.metrics.parquet.parts import PartFiles, PartWriter
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.writer import SampleSource

from .stored_history import files, in_directory, values

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Samples = Callable[..., pl.DataFrame]


def test_parts_of_a_day_are_merged_on_read(store: SampleStore, samples: Samples) -> None:
    """Readers see the same samples before and after compaction."""
    seen: list[list[object]] = []

    def landed(_: object) -> None:
        seen.append([*values(SampleStore(store.place)), [p.single for p in store.parts()]])

    with writer.StoreWriter(store.files, on_landed=landed, rows_at_once=1) as session:
        session.add([samples([1.0, 2.0])], SampleSource("a"))
        session.add([samples([None, 3.0, 4.0], power_w=9.0)], SampleSource("b"))
    assert seen == [[1.0, 2.0, [True]], [1.0, 3.0, 4.0, [False, False]]]
    store.close()
    assert values(store) == [1.0, 3.0, 4.0]
    assert values(store, "power_w") == [9.0, 9.0, 9.0]


def test_failing_source_is_discarded_and_others_are_kept(store: SampleStore, samples: Samples) -> None:
    """This includes the parts of it that were already written."""

    def broken():  # type: ignore[no-untyped-def]
        yield samples([1.0, 2.0])
        yield samples([3.0], start=EIGHT + timedelta(hours=1))
        raise RuntimeError("cut off")

    with writer.StoreWriter(store.files, rows_at_once=2) as session:
        session.add([samples([9.0], uuid="GPU-9")], SampleSource("good"))
        with pytest.raises(RuntimeError):
            session.add(broken(), SampleSource("bad"))
        session.add([samples([8.0], uuid="GPU-8")], SampleSource("good too"))
    assert sorted(store.scan().collect()["uuid"]) == ["GPU-8", "GPU-9"]


def test_exception_in_writer_discards_pending_samples(store: SampleStore, samples: Samples) -> None:
    """The staging directory is removed."""

    def interrupted() -> None:
        with store.writer() as session:
            session.add([samples([1.0])], SampleSource("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert store.days() == []
    assert list((store.root / "staging").iterdir()) == []


@in_directory
def test_crash_before_manifest_update_keeps_old_samples(
    store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old manifest stays valid; the next writer deletes the files that it does not list."""
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


@in_directory
def test_staging_of_dead_writer_is_removed(store: SampleStore, samples: Samples) -> None:
    """A writer is dead if its lock file is not locked."""
    dead = store.root / "staging" / "dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "part-x.parquet").write_bytes(b"half")
    store.ingest(samples([1.0]), source="a")
    assert not dead.exists()


@in_directory
def test_reader_keeps_parts_during_compaction(store: SampleStore, samples: Samples) -> None:
    """A query planned before a compaction still runs; the first write after the reader has closed deletes the files."""
    store.ingest(samples([1.0]), source="a")
    plan = store.scan()
    SampleStore(store.place).ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert plan.collect()["util_pct"].to_list() == [1.0]
    assert len(files(store)) == 9
    store.close()
    SampleStore(store.place).ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert len(files(store)) == 3


def _write_many(place: StorePlace, node: str) -> None:
    frames = [
        pl.DataFrame(
            {"cluster": ["a"] * 20, "node": [node] * 20, "uuid": [f"GPU-{gpu}"] * 20,
             "time": [EIGHT + timedelta(seconds=n) for n in range(20)], "util_pct": [1.0] * 20}
        )
        for gpu in range(5)
    ]  # fmt: skip
    for number, frame in enumerate(frames):
        SampleStore(place).ingest(frame, source=f"{node}-{number}")


def test_two_processes_can_write_concurrently(store: SampleStore) -> None:
    """No sample is lost or duplicated, and the day ends up as one part."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(store.place, f"gpu0{n}")) for n in range(2)]
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


def test_part_without_samples_or_identities_is_rejected(tmp_path: Path) -> None:
    """Such errors of the caller leave no files."""
    ids = with_device(pl.DataFrame({"cluster": "a", "node": "n1", "uuid": ["GPU-1"]}))
    with pytest.raises(ValueError, match="at least one"), PartWriter(PartFiles.of(tmp_path, "x"), "x", ids) as part:
        part.write(pl.DataFrame({"device": [], "time": []}))
    frame = pl.DataFrame({"device": pl.Series([1], dtype=pl.UInt64), "time": [EIGHT]})
    with pytest.raises(ValueError, match="no identity"), PartWriter(PartFiles.of(tmp_path, "x"), "x", ids) as part:
        part.write(frame)
    assert list(tmp_path.iterdir()) == []


def test_compaction_processes_large_days_in_device_ranges(
    store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on the number of rows read at once."""
    monkeypatch.setattr(writer.compact, "__kwdefaults__", {"rows_at_once": 7})
    frames = [samples([float(n), None, float(n)], uuid=f"GPU-{n}", job=str(n)) for n in range(6)]
    with writer.StoreWriter(store.files, rows_at_once=1) as session:
        for number, frame in enumerate([*frames, *frames[::2]]):
            session.add([frame], SampleSource(str(number)))
    whole = store.scan().collect().sort("uuid", "time")
    assert whole["util_pct"].to_list() == [x for n in range(6) for x in (n, None, n)]
    assert len(files(store)) == 3


@in_directory
def test_damaged_manifest_and_tables_are_reported(store: SampleStore, samples: Samples) -> None:
    """The error names the damaged file."""
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


@in_directory
def test_keys_of_a_later_release_in_the_manifest_are_ignored(store: SampleStore, samples: Samples) -> None:
    """A change that an older release must not ignore gets another version."""
    store.ingest(samples([1.0]), source="a")
    path = store.root / manifest.FILE
    data = json.loads(path.read_text())
    for entries in data["days"].values():
        for entry in entries:
            entry["later"] = 1
    path.write_text(json.dumps({**data, "later": 1, "samples": {"1": {"size": 1, "digest": "x", "later": 1}}}))
    assert manifest.load(store.root).samples == {"1": manifest.SamplesFile(1, "x")}
    assert len(store.scan().collect()) == 1


@in_directory
def test_samples_without_manifest_are_kept_and_reported(store: SampleStore, samples: Samples) -> None:
    """A partly restored backup looks like this: nothing is read, written or deleted. New stores begin with it."""
    store.ingest(samples([1.0]), source="a")
    before = files(store)
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
    assert files(store) == before
    path.write_text(good)
    assert len(store.scan().collect()) == 1


def test_interrupted_first_ingest_leaves_a_manifest(
    tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted after its part was moved; the next ingest deletes the part."""
    store = SampleStore(tmp_path / "history")
    with monkeypatch.context() as patch:
        patch.setattr(manifest.StoreManifest, "with_parts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.ingest(samples([1.0]), source="a")
    assert files(store)
    assert store.days() == []
    store.ingest(samples([2.0]), source="b")
    assert store.scan().collect()["util_pct"].to_list() == [2.0]


def test_full_disk_at_last_table_is_reported(tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of files that Polars writes are translated as well; its other errors are passed on."""
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


def test_unwritable_directory_is_reported(tmp_path: Path, samples: Samples) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnreachableError, match="cannot be written"):
        SampleStore(tmp_path / "file" / "history").ingest(samples([1.0]), source="a")
    assert SampleStore(tmp_path / "file" / "history").days() == []
