"""The sample store in an object store: commits of several writers, deletion, copies, damage."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from object_server import ObjectServer, refusal

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.object_url import ObjectPrefix
from slurm_affinode.metrics.parquet import bucket, manifest, writer
from slurm_affinode.metrics.parquet.bucket import StoreBucket
from slurm_affinode.metrics.parquet.objects import ConflictError, ObjectClient, Version
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.writer import SampleSource

from .stored_history import files, values

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Samples = Callable[..., pl.DataFrame]


@pytest.fixture
def place(object_server: ObjectServer, tmp_path: Path) -> ObjectPrefix:
    """A new bucket."""
    return object_server.prefix(tmp_path / "copies")


@pytest.fixture
def store(place: ObjectPrefix) -> SampleStore:
    """An empty sample store."""
    return SampleStore(place)


def elsewhere(place: ObjectPrefix, name: str = "elsewhere") -> SampleStore:
    """Return the same store as another machine has it."""
    return SampleStore(replace(place, cache=place.cache.parent / name))


def store_with(place: ObjectPrefix, **options: Any) -> SampleStore:
    """Return a store with options of ``StoreBucket``."""
    store = SampleStore(place)
    store.files = StoreBucket(place, **options)
    return store


def names(place: ObjectPrefix) -> set[str]:
    """Return the names of all objects of parts."""
    return {listed.name for listed in ObjectClient(place.url).names() if listed.name.endswith(".parquet")}


def overwrite(place: ObjectPrefix, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the content of an object."""
    client = ObjectClient(place.url)
    content, version = client.get(name) or (b"", {})
    client.put(name, change(content), version)


def on_manifest(object_server: ObjectServer, act: Callable[[], None], method: str = "PUT") -> None:
    """Call ``act`` before the next request for a manifest."""

    def before(seen: str, path: str) -> None:
        if (seen, path.rpartition("/")[2]) == (method, manifest.FILE):
            object_server.before = lambda method, path: None
            act()

    object_server.before = before


def test_commit_of_another_writer_is_merged(
    object_server: ObjectServer, place: ObjectPrefix, store: SampleStore, samples: Samples
) -> None:
    """Another machine commits between reading and writing the manifest."""
    store.ingest(samples([1.0]), source="a")
    with store.writer() as session:
        session.add([samples([2.0], uuid="GPU-2")], SampleSource("b"))
        on_manifest(object_server, lambda: elsewhere(place).ingest(samples([3.0], uuid="GPU-3"), source="c") and None)
    assert sorted(values(store)) == [1.0, 2.0, 3.0]
    assert session.totals.new == 1
    assert len(files(store)) == 3


def test_new_store_of_two_writers_is_created_once(
    object_server: ObjectServer, place: ObjectPrefix, store: SampleStore, samples: Samples
) -> None:
    on_manifest(object_server, lambda: elsewhere(place).ingest(samples([3.0], uuid="GPU-3"), source="c") and None)
    store.ingest(samples([1.0]), source="a")
    assert sorted(values(store)) == [1.0, 3.0]


def test_part_that_lands_during_a_compaction_is_kept(
    place: ObjectPrefix, store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays behind the compacted one, in the order of ingest; its own writer compacts the day again."""
    store.ingest(samples([1.0]), source="a")
    compact, late = writer.compact, elsewhere(place).writer()

    def slow(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(writer, "compact", compact)
        late.__enter__().add([samples([4.0])], SampleSource("late"))
        late.flush()
        return compact(*args, **options)

    monkeypatch.setattr(writer, "compact", slow)
    store.ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert [part.rows for part in store.parts()] == [2, 1]
    assert sorted(values(store)) == [2.0, 4.0]
    late.__exit__(None, None, None)
    assert [part.rows for part in store.parts()] == [2]
    assert sorted(values(store)) == [2.0, 4.0]


def test_superseded_compaction_is_repeated(
    place: ObjectPrefix, store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has compacted the same parts meanwhile: nothing is lost, and no object is left."""
    store.ingest(samples([1.0]), source="a")
    compact = writer.compact

    def slow(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(writer, "compact", compact)
        elsewhere(place).ingest(samples([3.0], uuid="GPU-3"), source="c")
        return compact(*args, **options)

    monkeypatch.setattr(writer, "compact", slow)
    store.ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert sorted(values(store)) == [1.0, 2.0, 3.0]
    assert len(files(store)) == 3


class LosesAnswer(ObjectClient):
    """The answers to two manifests are lost: the library writes them again, and is refused."""

    lost = 2

    def put(self, name: str, content: bytes, known: Version | None) -> Version:
        """Write, and raise ``ConflictError`` although it was this writer."""
        version = super().put(name, content, known)
        if name == manifest.FILE and known is not None and self.lost:
            self.lost -= 1
            raise ConflictError(name)
        return version


def test_commit_whose_answer_was_lost_is_not_repeated(place: ObjectPrefix, samples: Samples) -> None:
    """The second one is that of the compaction."""
    SampleStore(place).ingest(samples([1.0]), source="a")
    lossy = LosesAnswer(place.url)
    store = store_with(place, client=lossy, sleep=lambda _: None)
    totals = store.ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert (lossy.lost, totals.new, sorted(values(store))) == (0, 1, [1.0, 2.0])
    assert [part.rows for part in store.parts()] == [2]


def test_writer_that_never_is_first_gives_up(place: ObjectPrefix, samples: Samples) -> None:
    class Refused(ObjectClient):
        def put(self, name: str, content: bytes, known: Version | None) -> Version:
            if known is None:
                return super().put(name, content, known)
            raise ConflictError(name)

    waits: list[float] = []
    store = store_with(place, client=Refused(place.url), sleep=waits.append)
    with pytest.raises(UnreachableError, match=f"^{place.url}: other writers were first 30 times$"):
        store.ingest(samples([1.0]), source="a")
    assert len(waits) == bucket.ATTEMPTS
    assert max(waits) <= 2.0


def _killed_before_commit(place: ObjectPrefix, frame: pl.DataFrame) -> None:
    manifest.text = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    SampleStore(place).ingest(frame, source="killed")


def test_objects_of_killed_writer_are_deleted_after_a_day(
    place: ObjectPrefix, store: SampleStore, samples: Samples
) -> None:
    """Until then, they could be those of a writer that is about to commit them."""
    store.ingest(samples([1.0]), source="a")
    store.close()
    before = names(place)
    killed = multiprocessing.get_context("spawn").Process(
        target=_killed_before_commit, args=(place, samples([2.0], uuid="GPU-2"))
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    left = names(place) - before
    assert len(left) == 3
    assert values(store) == [1.0]
    store.close()
    store.ingest(samples([3.0], uuid="GPU-3"), source="c")
    assert names(place) > left
    assert list(place.cache.glob("staging/*")) == []
    later = store_with(place, now=lambda: time.time() + bucket.KEPT_S + 60)
    later.ingest(samples([3.0], uuid="GPU-3"), source="c")
    assert not names(place) & left
    assert sorted(values(later)) == [1.0, 3.0]


def test_replaced_parts_are_deleted_after_a_day(place: ObjectPrefix, store: SampleStore, samples: Samples) -> None:
    """However old they are: a reader elsewhere reads what it has begun to read."""
    then = time.time()
    store.ingest(samples([1.0]), source="a")
    reader = elsewhere(place, "reader")
    (part,) = reader.parts()
    at_ten_days = store_with(place, now=lambda: then + 10 * bucket.KEPT_S)
    at_ten_days.ingest(samples([2.0], uuid="GPU-2"), source="b")
    reader.fetch([part.path])
    assert len(pl.read_parquet(part.path)) == 1
    assert len(names(place)) == 9
    at_ten_days.ingest(samples([2.0], uuid="GPU-2"), source="b")
    assert len(names(place)) == 15
    after = store_with(place, now=lambda: then + 11 * bucket.KEPT_S + 60)
    with after.writer():
        pass
    assert names(place) == {f"day=2026-11-01/{name}" for name in files(after)}
    assert len(names(place)) == 3
    assert sorted(values(after)) == [1.0, 2.0]


def test_late_commit_is_refused(place: ObjectPrefix, samples: Samples) -> None:
    """A machine was suspended between upload and commit: its objects may be gone."""
    hours = iter([0.0, 0.0, 13.0])
    store = store_with(place, now=lambda: next(hours) * 3600)
    with pytest.raises(UnreachableError, match=r": 12 h have passed since the samples were written$"):
        store.ingest(samples([1.0]), source="a")
    assert values(SampleStore(place)) == []


def test_deleted_days_are_deleted_from_the_copies_too(
    place: ObjectPrefix, store: SampleStore, samples: Samples
) -> None:
    store.ingest(pl.concat([samples([1.0]), samples([2.0], start=EIGHT + timedelta(days=1))]), source="a")
    assert values(store) == [1.0, 2.0]
    store.delete_before(date(2026, 11, 2))
    assert values(store) == [2.0]
    assert [path.name for path in place.cache.glob("day=*")] == ["day=2026-11-02"]
    with store_with(place, now=lambda: time.time() + bucket.KEPT_S + 60).writer():
        pass
    assert {name.partition("/")[0] for name in names(place)} == {"day=2026-11-02"}


def test_reader_copies_the_days_that_it_needs(
    object_server: ObjectServer, place: ObjectPrefix, store: SampleStore, samples: Samples
) -> None:
    """Each file once; the tables beside the samples do not need the samples."""
    days = [samples([float(day)], start=EIGHT + timedelta(days=day)) for day in range(5)]
    store.ingest(pl.concat(days), source="a")
    reader = elsewhere(place)
    object_server.requests.clear()
    since = EIGHT + timedelta(days=3)
    for _ in range(2):
        assert reader.scan(since).collect()["util_pct"].to_list() == [3.0, 4.0]
        assert len(reader.devices(since)) == 1
    got = [path for method, path in object_server.requests if method == "GET" and path.endswith(".parquet")]
    assert sorted(path.split("/")[-2] + path.split("/")[-1].partition("-")[0] for path in got) == [
        f"day=2026-11-0{day}{kind}" for day in (4, 5) for kind in ("devices", "part")
    ]


def test_copies_beyond_the_limit_are_deleted_when_no_command_uses_them(
    place: ObjectPrefix, store: SampleStore, samples: Samples
) -> None:
    """Those that were unused for longest."""
    days = [samples([float(day)], start=EIGHT + timedelta(days=day)) for day in range(3)]
    store.ingest(pl.concat(days), source="a")
    store.close()
    parts = sorted(place.cache.glob("day=*/part-*.parquet"))
    for age, path in zip((30, 10, 20), parts, strict=True):
        os.utime(path, (time.time() - age,) * 2)
    for path in place.cache.glob("day=*/[dj]*-*.parquet"):
        path.unlink()
    half_written = parts[0].parent / ".part-x.parquet.1234.tmp"
    half_written.write_bytes(b"half")
    small = SampleStore(replace(place, cache_bytes=parts[1].stat().st_size + 100))
    busy = SampleStore(place)
    busy.days()
    assert small.days()
    small.close()
    assert len(list(place.cache.glob("day=*/part-*"))) == 3
    busy.close()
    small.days()
    assert list(place.cache.glob("day=*/part-*")) == [parts[1]]
    assert not half_written.exists()
    assert values(small) == [0.0, 1.0, 2.0]


def test_several_readers_share_the_copies(place: ObjectPrefix, store: SampleStore, samples: Samples) -> None:
    days = [samples([float(day)], start=EIGHT + timedelta(days=day)) for day in range(4)]
    store.ingest(pl.concat(days), source="a")
    shared = replace(place, cache=place.cache.parent / "shared")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: values(SampleStore(shared)), range(4))) == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert not list(shared.cache.glob("day=*/.*"))


@pytest.mark.parametrize("kind", ["part", "devices"])
def test_damaged_object_is_reported(place: ObjectPrefix, store: SampleStore, samples: Samples, kind: str) -> None:
    """No copy is made of it."""
    store.ingest(samples([1.0, 2.0]), source="a")
    (name,) = [name for name in names(place) if f"/{kind}-" in name]
    overwrite(place, name, lambda content: content[:-9] + b"x" * 9)
    reader = elsewhere(place)
    read = (lambda: values(reader)) if kind == "part" else reader.devices
    with pytest.raises(UnreachableError, match=rf"^{place.url}/{name}: its contents have changed since"):
        read()
    assert not list(reader.root.glob("day=*/*"))


def test_missing_object_is_reported(place: ObjectPrefix, store: SampleStore, samples: Samples) -> None:
    store.ingest(samples([1.0]), source="a")
    (name,) = [name for name in names(place) if "/part-" in name]
    ObjectClient(place.url).delete([name])
    with pytest.raises(UnreachableError, match=rf"^{place.url}/{name}: does not exist$"):
        values(elsewhere(place))
    assert values(store) == [1.0]


def test_damaged_and_missing_manifest_are_reported(place: ObjectPrefix, store: SampleStore, samples: Samples) -> None:
    """Nothing is deleted."""
    store.ingest(samples([1.0]), source="a")
    before = names(place)
    overwrite(place, manifest.FILE, lambda _: b"{")
    with pytest.raises(AffinodeError, match=rf"^{place.url}/{manifest.FILE}: is damaged: "):
        store.days()
    ObjectClient(place.url).delete([manifest.FILE])
    store.close()
    for touch in (elsewhere(place).days, lambda: elsewhere(place).ingest(samples([2.0]), source="b")):
        with pytest.raises(AffinodeError, match=r"manifest\.json: is missing, and there are samples \(day="):
            touch()
    assert names(place) == before


def test_name_that_leaves_the_directory_is_refused(place: ObjectPrefix, store: SampleStore, samples: Samples) -> None:
    """Others may be able to write to the bucket."""
    store.ingest(samples([1.0]), source="a")
    client = ObjectClient(place.url)
    content, version = client.get(manifest.FILE) or (b"", {})
    name = store.parts()[0].entry.name
    for hostile in ("../../x", "a/b", "/etc/x", ""):
        version = client.put(manifest.FILE, content.replace(name.encode(), hostile.encode()), version)
        with pytest.raises(AffinodeError, match=r"manifest\.json: is damaged"):
            elsewhere(place).parts()


def test_permission_that_ends_during_an_ingest_loses_nothing(
    object_server: ObjectServer, place: ObjectPrefix, store: SampleStore, samples: Samples
) -> None:
    """The same ingest, with new credentials, continues: sources that it has stored are skipped."""
    store.ingest(samples([1.0]), source="a", fingerprint="1")
    expired = refusal("400 Bad Request", "ExpiredToken", "The provided token has expired.")
    object_server.before = lambda method, path: expired if method == "PUT" and path.endswith(manifest.FILE) else None
    with pytest.raises(UnreachableError, match=r"manifest\.json: cannot be written: ExpiredToken: The provided token"):
        store.ingest(samples([2.0], uuid="GPU-2"), source="b", fingerprint="2")
    object_server.before = lambda method, path: None
    assert (values(store), store.sources()) == ([1.0], {"1"})
    store.ingest(samples([2.0], uuid="GPU-2"), source="b", fingerprint="2")
    assert (sorted(values(store)), store.sources()) == ([1.0, 2.0], {"1", "2"})


def test_directory_can_be_copied_to_objects_and_back(place: ObjectPrefix, tmp_path: Path, samples: Samples) -> None:
    """Names and contents are the same, so that any program that copies files moves a store."""
    local = SampleStore(tmp_path / "history")
    local.ingest(samples([1.0], job="7"), source="a", fingerprint="1")
    local.close()
    client = ObjectClient(place.url)
    for path in sorted(path for path in local.root.rglob("*") if path.is_file()):
        client.upload(str(path.relative_to(local.root)), path)
    moved = SampleStore(place)
    assert values(moved) == [1.0]
    assert moved.sources() == {"1"}
    moved.ingest(samples([2.0], uuid="GPU-2"), source="b", fingerprint="2")
    assert values(elsewhere(place)) == values(moved)
    back = tmp_path / "back"
    for listed in client.names():
        path = back / listed.name
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download(listed.name, path)
    again = SampleStore(back)
    assert (values(again), again.sources()) == (values(moved), {"1", "2"})
    again.ingest(samples([3.0], uuid="GPU-3"), source="c")
    again.close()
    again.ingest(samples([3.0], uuid="GPU-3"), source="c")
    assert len(list(back.glob("day=*/*.parquet"))) == 3
    shutil.rmtree(back)


def test_engine_samples_are_a_store_of_their_own(place: ObjectPrefix, store: SampleStore, samples: Samples) -> None:
    """They are below the same URL, and an ingest of GPU samples does not delete them."""
    inner = SampleStore(place / "serving")
    inner.ingest(samples([5.0]), source="a")
    later = store_with(place, now=lambda: time.time() + bucket.KEPT_S + 60)
    later.ingest(samples([1.0]), source="a")
    assert (values(inner), values(later)) == ([5.0], [1.0])
    assert values(SampleStore(replace(place, cache=place.cache.parent / "b") / "serving")) == [5.0]
