"""The sample store: idempotent, merged, independent of the order of ingest."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.metrics.identity import device_id, with_device
from slurm_affinode.metrics.parquet import manifest, writer
from slurm_affinode.metrics.parquet.parts import damaged, read_tables
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.writer import SampleSource
from slurm_affinode.metrics.schema import METRICS, SAMPLES

from .stored_history import files, in_directory, values

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
DAY = date(2026, 11, 1)
Samples = Callable[..., pl.DataFrame]


def test_stored_samples_are_unchanged(store: SampleStore, samples: Samples) -> None:
    """0 and missing values stay different; identity, times and labels are kept."""
    frame = samples([0.0, None, 50.0], fb_used_mib=512.0, job="7", model="A100", index=3)
    totals = store.ingest(frame, source="here")
    back = store.scan().collect().select(*SAMPLES)
    assert back.equals(frame.cast(dict(SAMPLES)))
    assert (totals.samples, totals.new, totals.duplicates, totals.days) == (3, 3, 0, (DAY,))


def test_ingesting_the_same_samples_twice_is_a_no_op(store: SampleStore, samples: Samples) -> None:
    """All samples of the second ingest are duplicates, and the day still has one part."""
    store.ingest(samples([1.0, 2.0]), source="a")
    totals = store.ingest(samples([1.0, 2.0]), source="b")
    assert (totals.new, totals.duplicates) == (0, 2)
    assert values(store) == [1.0, 2.0]
    assert len(files(store)) == 3


def test_overlapping_files_are_merged_in_any_order(store: SampleStore, samples: Samples) -> None:
    """A later file may start before the end, or before the start, of an earlier one."""
    store.ingest(samples([3.0, 4.0, 5.0], start=EIGHT + timedelta(seconds=60)), source="late")
    totals = store.ingest(samples([1.0, 2.0, 3.0, 4.0]), source="early")
    assert values(store) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert totals.new == 2


def test_copies_of_a_sample_are_merged(store: SampleStore, samples: Samples) -> None:
    """A missing value never replaces a known one, and the job IDs of all copies are united."""
    store.ingest(samples([1.0], power_w=100.0, fb_used_mib=3.0, job="7,9"), source="a")
    store.ingest(samples([2.0], power_w=None, fb_used_mib=2.0, job="8"), source="b")
    (row,) = store.scan().collect().iter_rows(named=True)
    result = [row[name] for name in ("util_pct", "power_w", "fb_used_mib", "job")]
    assert result == [2.0, 100.0, 3.0, "7,8,9"]


@pytest.mark.parametrize("order", [(0.0, 90.0), (90.0, 0.0)])
def test_source_that_reads_0_does_not_make_a_gpu_idle(
    store: SampleStore, samples: Samples, order: tuple[float, float]
) -> None:
    """The order of ingest does not decide which of two sources is right, nor do fewer errors."""
    for number, value in enumerate(order):
        store.ingest(samples([value], xid=int(value)), source=str(number))
    (row,) = store.scan().collect().iter_rows(named=True)
    assert (row["util_pct"], row["xid"]) == (90.0, 90)


def test_corrected_source_replaces_its_own_values(store: SampleStore, samples: Samples) -> None:
    """Its last ingest counts, where it has a value; of rows that it has twice, the largest one."""
    store.ingest(samples([90.0, 80.0, 70.0], power_w=300.0), source="a")
    store.ingest(pl.concat([samples([0.0, None, 5.0], power_w=50.0), samples([1.0])]), source="a")
    assert values(store) == [1.0, 80.0, 5.0]
    assert store.scan().collect()["power_w"].to_list() == [50.0, 50.0, 50.0]


def test_corrected_source_does_not_replace_values_of_others(store: SampleStore, samples: Samples) -> None:
    """Not even where it once agreed with another source."""
    store.ingest(samples([90.0, 90.0]), source="a")
    store.ingest(samples([90.0, 20.0]), source="b")
    store.ingest(samples([0.0, 0.0]), source="a")
    assert values(store) == [90.0, 90.0]
    assert len(files(store)) == 3


def test_days_that_are_not_compacted_have_the_same_corrections(store: SampleStore, samples: Samples) -> None:
    """Parts are merged by the same rule on reading."""
    merged = []
    with store.writer() as session:
        for name, result in (("a", [90.0, 90.0, 1.0]), ("b", [50.0]), ("c", [None, None, 7.0])):
            session.add([samples(result)], SampleSource(name, origin=name))
            session.flush()
    with store.writer() as session:
        session.add([samples([0.0, 0.0])], SampleSource("a", origin="a"))
        session.flush()
        merged.append(values(store))
    merged.append(values(store))
    assert merged == [[90.0, 0.0, 7.0]] * 2


def test_row_without_values_marks_unmeasured_time(store: SampleStore, samples: Samples) -> None:
    """The sample before it does not count for that time, even if the device never has a value."""
    rows = pl.concat([samples([1.0, None, 0.0]), samples([None, None], uuid="GPU-silent", index=7)])
    totals = store.ingest(rows, source="a")
    assert (totals.samples, values(store)) == (5, [1.0, None, 0.0, None, None])
    assert len(store.devices()) == 2


def test_days_are_utc_days(store: SampleStore, samples: Samples) -> None:
    """Midnight belongs to the new day."""
    store.ingest(samples([1.0, 2.0], start=datetime(2026, 11, 1, 23, 59, 30, tzinfo=UTC)), source="a")
    assert store.days() == [DAY, date(2026, 11, 2)]
    assert store.span() == (datetime(2026, 11, 1, 23, 59, 30, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC))
    midnight = datetime(2026, 11, 2, tzinfo=UTC)
    assert store.scan(midnight, midnight + timedelta(1)).collect()["util_pct"].to_list() == [2.0]
    assert store.scan(until=midnight).collect()["util_pct"].to_list() == [1.0]
    assert [part.day for part in store.parts(until=midnight)] == [DAY]


def test_clusters_can_have_equal_node_and_gpu_names(store: SampleStore, samples: Samples) -> None:
    """The cluster is part of the identity."""
    store.ingest(samples([1.0], cluster="alpha"), source="a")
    store.ingest(samples([2.0], cluster="beta"), source="b")
    assert sorted(store.scan().collect().select("cluster", "util_pct").rows()) == [("alpha", 1.0), ("beta", 2.0)]
    assert len(store.devices()) == 2


def test_mig_instance_and_parent_are_separate_devices(store: SampleStore, samples: Samples) -> None:
    """The parent has the same UUID and no instance ID."""
    store.ingest(samples([None], power_w=150.0), source="parent")
    store.ingest(samples([None], mig="7", mig_profile="1g.10gb", engine_active=0.5), source="child")
    devices = store.devices().sort("mig", nulls_last=False)
    assert devices.select("uuid", "mig").rows() == [("GPU-1", None), ("GPU-1", "7")]


def test_device_table_has_rows_span_and_interval(store: SampleStore, samples: Samples) -> None:
    """The interval is the median gap of each device, so one missing sample does not change it."""
    store.ingest(samples([0.0] * 5, step_s=57), source="a")
    late = samples([0.0] * 3, start=EIGHT + timedelta(hours=1), step_s=57)
    store.ingest(pl.concat([late, samples([0.0], uuid="GPU-2")]), source="b")
    table = store.devices().sort("uuid")
    assert table.select("uuid", "rows", "step_ms").rows() == [("GPU-1", 8, 57_000), ("GPU-2", 1, None)]
    assert table["last"][0] == EIGHT + timedelta(hours=1, seconds=114)


def test_device_table_gives_row_offsets(store: SampleStore, samples: Samples) -> None:
    """A reader slices a part by the running sum of ``rows``."""
    store.ingest(pl.concat([samples([float(n)] * (n + 1), uuid=f"GPU-{n}") for n in range(4)]), source="a")
    (part,) = store.parts()
    assert part.single
    whole = pl.read_parquet(part.path)
    start = 0
    for row in part.devices().iter_rows(named=True):
        device_rows = whole[start : start + row["rows"]]
        assert set(device_rows["device"]) == {row["device"]}
        assert set(device_rows["uuid"]) == {row["uuid"]}
        assert device_rows["time"].is_sorted()
        start += row["rows"]
    assert start == part.rows == len(whole)


def test_job_labels_are_found_without_reading_samples(store: SampleStore, samples: Samples) -> None:
    """There is one row per sequence of consecutive samples with the ID; a shared GPU has rows for both jobs."""
    labels = ["7", "7,8", "8", None, "7"]
    frame = samples([0.0] * 5).with_columns(pl.Series("job", labels))
    store.ingest(frame, source="a")
    jobs = store.parts()[0].jobs().sort("first", "job")
    at = [EIGHT + timedelta(seconds=30 * n) for n in range(5)]
    assert jobs.select("job", "first", "last", "rows").rows() == [
        ("7", at[0], at[1], 2),
        ("8", at[1], at[2], 2),
        ("7", at[4], at[4], 1),
    ]


@pytest.mark.parametrize("first", ["index", "uuid"])
def test_gpu_known_by_index_adopts_uuid(store: SampleStore, samples: Samples, first: str) -> None:
    """dmon gives indices, dcgm-exporter UUIDs: both are the same device, whichever is ingested first."""
    by_index = samples([None, 5.0], uuid=None, index=0, power_w=70.0)
    by_uuid = samples([4.0], index=0, pci="00000000:07:00.0")
    for frame in (by_index, by_uuid) if first == "index" else (by_uuid, by_index):
        store.ingest(frame, source="x")
    whole = store.scan().collect()
    assert whole.select("uuid", "util_pct", "power_w").rows() == [("GPU-1", 4.0, 70.0), ("GPU-1", 5.0, 70.0)]
    assert store.devices()["device"].to_list() == [device_id("alpha", "gpu01", "GPU-1", None, None, None)]


def test_gpu_known_by_pci_address_adopts_uuid(store: SampleStore, samples: Samples) -> None:
    """A GPU known by index adopts it through the address."""
    store.ingest(samples([1.0], uuid=None, pci="00000000:07:00.0", index=0), source="a")
    store.ingest(samples([2.0], uuid=None, index=0, start=EIGHT + timedelta(minutes=1)), source="b")
    assert len(store.devices()) == 1
    store.ingest(samples([3.0], pci="00000000:07:00.0", start=EIGHT + timedelta(minutes=2)), source="c")
    assert store.scan().collect().select("uuid", "util_pct").rows() == [("GPU-1", 1.0), ("GPU-1", 2.0), ("GPU-1", 3.0)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_sources_with_different_gpu_ids_merge_in_any_order(
    store: SampleStore, samples: Samples, order: tuple[int, ...]
) -> None:
    """The sources give the index, the address, the UUID and address, or all of them."""
    pci = "00000000:07:00.0"
    sources = (
        samples([None], uuid=None, index=0, power_w=70.0),
        samples([None], uuid=None, pci=pci, sm_active=0.5),
        samples([4.0], pci=pci),
        samples([None], index=0, pci=pci, fb_used_mib=9.0),
    )
    for number in order:
        store.ingest(sources[number], source=str(number))
    columns = ("uuid", "pci", "index", "util_pct", "power_w", "sm_active", "fb_used_mib")
    assert store.scan().collect().select(columns).rows() == [("GPU-1", pci, 0, 4.0, 70.0, 0.5, 9.0)]


def test_ambiguous_index_is_not_adopted(store: SampleStore, samples: Samples) -> None:
    """A GPU was replaced during the day, so the index does not identify it."""
    store.ingest(pl.concat([samples([1.0], index=0), samples([2.0], uuid="GPU-2", index=0)]), source="a")
    store.ingest(samples([3.0], uuid=None, index=0), source="b")
    assert len(store.devices()) == 3


def test_days_before_a_date_are_deleted(store: SampleStore, samples: Samples) -> None:
    """The directories of the days are deleted, too."""
    for day in (1, 2, 3):
        store.ingest(samples([1.0], start=datetime(2026, 11, day, 8, tzinfo=UTC)), source="a")
    assert store.delete_before(date(2026, 11, 3)) == [DAY, date(2026, 11, 2)]
    assert store.days() == [date(2026, 11, 3)]
    assert SampleStore(store.place / "none").delete_before(DAY) == []
    store.close()
    store.delete_before(date(2026, 11, 3))
    store.ingest(samples([1.0], start=datetime(2026, 11, 3, 8, tzinfo=UTC)), source="a")
    store.files.hold()
    assert [path.name for path in store.root.glob("day=*")] == ["day=2026-11-03"]


def test_day_can_be_written_from_ordered_columns(store: SampleStore) -> None:
    """For generated data: without ingest, from several frames, with a device that continues in the next frame."""
    ids = with_device(pl.DataFrame({"cluster": "a", "node": "n1", "uuid": ["GPU-1", "GPU-2"]})).sort("device")
    times = pl.datetime_range(EIGHT, EIGHT + timedelta(seconds=99), "1s", time_unit="ms", eager=True)
    frames = [
        pl.DataFrame({"device": pl.repeat(device, 50, dtype=pl.UInt64, eager=True), "time": part, "util_pct": 5.0})
        for device in ids["device"]
        for part in (times[:50], times[50:])
    ]
    part = store.write_day(DAY, frames, ids)
    assert (part.rows, part.single, part.first, part.last) == (200, True, times[0], times[-1])
    assert part.devices()["rows"].to_list() == [100, 100]
    assert store.scan().select(pl.len(), pl.col("util_pct").mean()).collect().row(0) == (200, 5.0)
    again = store.write_day(DAY, [frames[0]], ids.select(pl.exclude("device")))
    assert [item.rows for item in store.parts()] == [again.rows] == [50]


def test_samples_without_node_are_rejected(store: SampleStore, samples: Samples) -> None:
    """They could not be joined to jobs; the reader is at fault."""
    with pytest.raises(ValueError, match="node"):
        store.ingest(samples([1.0], node=None), source="a")


def test_empty_store_returns_no_data(store: SampleStore) -> None:
    """Reading creates no files."""
    assert (store.days(), store.parts(), store.span(), store.sources()) == ([], [], None, frozenset())
    assert store.scan().collect().is_empty()
    assert store.devices().is_empty()
    assert not isinstance(store.place, Path) or not store.root.exists()
    with store.writer():
        pass
    assert store.days() == []


_value = st.one_of(st.none(), st.integers(0, 3).map(float))
_row = st.tuples(st.integers(0, 1), st.integers(0, 4), _value, _value, st.sampled_from([None, "1", "2", "1,3"]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(_row, max_size=6), min_size=1, max_size=4))
def test_merge_rule_holds_for_any_split_into_files(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[int, int, float | None, float | None, str | None]]],
) -> None:
    """The stored samples are the fold of all rows by the merge rule, however the rows are split into files.

    Rows without values are kept.
    """
    store = SampleStore(tmp_path_factory.mktemp("fold"))
    expected: dict[tuple[str, datetime], dict[str, object]] = {}
    with writer.StoreWriter(store.files, rows_at_once=3) as session:
        for number, rows in enumerate(batches):
            frame = pl.DataFrame(
                [("a", "n", f"GPU-{g}", EIGHT + timedelta(seconds=t), u, p, j) for g, t, u, p, j in rows],
                schema={"cluster": pl.String, "node": pl.String, "uuid": pl.String,
                        "time": pl.Datetime("ms", "UTC"), "util_pct": pl.Float32, "power_w": pl.Float32,
                        "job": pl.String}, orient="row",
            )  # fmt: skip
            session.add([frame], SampleSource(str(number)))
            for g, t, u, p, j in rows:
                known = expected.setdefault((f"GPU-{g}", EIGHT + timedelta(seconds=t)), dict.fromkeys(("u", "p", "j")))
                known["u"] = u if known["u"] is None else max(u or 0.0, known["u"])
                known["p"] = p if known["p"] is None else max(p or 0.0, known["p"])
                ids = {word for word in f"{known['j'] or ''},{j or ''}".split(",") if word}
                known["j"] = ",".join(sorted(ids)) or None
    whole = store.scan().collect()
    result = {
        (row["uuid"], row["time"]): {"u": row["util_pct"], "p": row["power_w"], "j": row["job"]}
        for row in whole.iter_rows(named=True)
    }
    assert result == expected
    assert len(whole) == len(expected)
    assert set(METRICS) <= set(whole.columns)


def test_tables_of_many_days_are_read_in_batches(
    store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polars may report a deadlock on standard error if more than 512 files wait at once."""
    store.ingest(samples([1.0]), source="a")
    (part,) = store.parts()
    batches: list[int] = []
    collect = pl.collect_all
    monkeypatch.setattr(pl, "collect_all", lambda frames: batches.append(len(frames)) or collect(frames))
    assert len(read_tables([part.files] * 550)) == 550
    assert sum(batches) == 1100
    assert max(batches) < 512


def test_flipped_bit_in_small_tables_is_detected(store: SampleStore, samples: Samples) -> None:
    """The decoder, which some damage would crash together with the process, is not reached."""
    store.ingest(samples([1.0, 2.0], job="7"), source="a")
    (part,) = store.parts()
    for path, read in ((part.files.devices, part.devices), (part.files.jobs, part.jobs)):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(UnreachableError, match=f"{path}: .* changed since it was written"):
                read()
        path.write_bytes(whole)
        assert len(read()) == 1


@in_directory
def test_store_without_digests_is_read(store: SampleStore, samples: Samples) -> None:
    """Earlier releases wrote no digests; the decoder then detects damage. The next change writes the new version."""
    store.ingest(samples([1.0, 2.0], job="7"), source="a")
    path = store.root / manifest.FILE
    record = json.loads(path.read_text())
    for entry in record["days"]["2026-11-01"]:
        del entry["devices_digest"], entry["jobs_digest"]
    path.write_text(json.dumps({**record, "version": 1}))
    assert len(store.devices()) == 1
    (part,) = store.parts()
    part.files.jobs.write_bytes(b"PAR1")
    with pytest.raises(UnreachableError, match="jobs-"):
        part.jobs()
    store.ingest(samples([3.0], node="gpu02", uuid="GPU-2"), source="b")
    assert json.loads(path.read_text())["version"] == manifest.VERSION


@pytest.mark.parametrize("apart_s", [0.1, 5.0, 12.0])
@pytest.mark.parametrize("more", [0, 1])
def test_alternating_sources_do_not_shorten_the_interval(
    store: SampleStore, samples: Samples, apart_s: float, more: int
) -> None:
    """The time between two sources is not a sampling interval; otherwise the time between samples would be a gap."""
    store.ingest(samples([5.0] * 40), source="dcgm")
    store.ingest(samples([5.0] * (39 + more), start=EIGHT + timedelta(seconds=apart_s)), source="nvidia-smi")
    (step,) = store.devices()["step_ms"]
    assert 3 * step >= 30_000 - apart_s * 1000
    assert step <= 30_000


def test_interval_of_alternating_sources_is_a_median(store: SampleStore, samples: Samples) -> None:
    """The first source scrapes with jitter; the times between both vary, and the middle one counts."""
    for number, late_s in enumerate([0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 3.0, 1.0, 0.0, 2.0, 1.0]):
        start = EIGHT + timedelta(seconds=300 * number)
        store.ingest(samples([5.0], start=start + timedelta(seconds=late_s)), source=f"a{number}")
        store.ingest(samples([5.0], start=start + timedelta(seconds=7)), source=f"b{number}")
    assert store.devices()["step_ms"].to_list() == [294_000]


def test_gaps_between_bursts_do_not_change_the_interval(store: SampleStore, samples: Samples) -> None:
    """With bursts of three samples, the interval is that within a burst."""
    for number in range(8):
        store.ingest(samples([5.0] * 3, start=EIGHT + timedelta(seconds=600 * number)), source=str(number))
    assert store.devices()["step_ms"].to_list() == [30_000]


def test_ingest_into_day_with_damaged_part_is_reported(store: SampleStore, samples: Samples) -> None:
    """The error is one line that names the file; the new samples are stored next to the damaged ones."""
    store.ingest(samples([1.0] * 200), source="a")
    (part,) = store.parts()
    whole = part.path.read_bytes()
    part.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreachableError, match=rf"{part.path}: the GPU metrics cannot be read: [^\n]+$"):
        store.ingest(samples([2.0], node="gpu02", uuid="GPU-2"), source="b")
    assert part.path.exists()
    assert len(store.parts()) == 2


@pytest.mark.parametrize("error", ["Permission denied (os error 13): /x", "[Errno 13] Permission denied: '/x'"])
def test_part_that_may_not_be_read_is_not_to_be_removed(error: str) -> None:
    """The hint for a damaged file would lose its samples."""
    assert "remove" in (damaged(Path("/x"), "it ends early").hint or "")
    hint = damaged(Path("/x"), error).hint or ""
    assert "must be able to read" in hint
    assert "remove" not in hint
