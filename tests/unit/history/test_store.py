"""The history on disk: idempotent, merged, whatever the order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored_history import files, values

from slurm_affinode.errors import UnreachableError
from slurm_affinode.history import manifest, writer
from slurm_affinode.history.identity import device_id, with_device
from slurm_affinode.history.partfiles import read_tables
from slurm_affinode.history.schema import METRICS, SAMPLES
from slurm_affinode.history.store import SampleStore
from slurm_affinode.history.writer import Source

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
DAY = date(2026, 11, 1)
Samples = Callable[..., pl.DataFrame]


def test_samples_come_back_as_they_went_in(store: SampleStore, samples: Samples) -> None:
    """0 stays 0 and missing stays missing; identity, times and labels are kept."""
    frame = samples([0.0, None, 50.0], fb_used_mib=512.0, job="7", model="A100", index=3)
    totals = store.ingest(frame, source="here")
    back = store.scan().collect().select(*SAMPLES)
    assert back.equals(frame.cast(dict(SAMPLES)))
    assert (totals.samples, totals.new, totals.duplicates, totals.days) == (3, 3, 0, (DAY,))


def test_the_same_samples_twice_change_nothing(store: SampleStore, samples: Samples) -> None:
    """The second time everything is a duplicate, and the day is one part as before."""
    store.ingest(samples([1.0, 2.0]), source="a")
    totals = store.ingest(samples([1.0, 2.0]), source="b")
    assert (totals.new, totals.duplicates) == (0, 2)
    assert values(store) == [1.0, 2.0]
    assert len(files(store)) == 3


def test_overlapping_files_in_any_order_give_one_history(store: SampleStore, samples: Samples) -> None:
    """A later file may begin before an earlier one ends, or before it begins."""
    store.ingest(samples([3.0, 4.0, 5.0], start=EIGHT + timedelta(seconds=60)), source="late")
    totals = store.ingest(samples([1.0, 2.0, 3.0, 4.0]), source="early")
    assert values(store) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert totals.new == 2


def test_of_one_sample_said_twice_the_last_value_that_is_there_wins(store: SampleStore, samples: Samples) -> None:
    """Missing never erases a value, and the job ids of all readings are united."""
    store.ingest(samples([1.0], power_w=100.0, job="7,9"), source="a")
    store.ingest(samples([2.0], power_w=None, job="8"), source="b")
    (row,) = store.scan().collect().iter_rows(named=True)
    assert (row["util_pct"], row["power_w"], row["job"]) == (2.0, 100.0, "7,8,9")


def test_a_row_without_any_value_is_time_in_which_nothing_was_measured(store: SampleStore, samples: Samples) -> None:
    """The sample before it does not count for that time, also where the device never shows a value."""
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


def test_two_clusters_may_have_nodes_and_gpus_of_the_same_name(store: SampleStore, samples: Samples) -> None:
    """The cluster is part of the identity."""
    store.ingest(samples([1.0], cluster="alpha"), source="a")
    store.ingest(samples([2.0], cluster="beta"), source="b")
    assert sorted(store.scan().collect().select("cluster", "util_pct").rows()) == [("alpha", 1.0), ("beta", 2.0)]
    assert len(store.devices()) == 2


def test_a_mig_instance_is_a_device_and_its_parent_is_recognisable(store: SampleStore, samples: Samples) -> None:
    """The parent has the same UUID and no instance id."""
    store.ingest(samples([None], power_w=150.0), source="parent")
    store.ingest(samples([None], mig="7", mig_profile="1g.10gb", engine_active=0.5), source="child")
    devices = store.devices().sort("mig", nulls_last=False)
    assert devices.select("uuid", "mig").rows() == [("GPU-1", None), ("GPU-1", "7")]


def test_the_table_of_devices_tells_rows_span_and_step(store: SampleStore, samples: Samples) -> None:
    """The step is the median gap of each device, so that one missing sample does not change it."""
    store.ingest(samples([0.0] * 5, step_s=57), source="a")
    late = samples([0.0] * 3, start=EIGHT + timedelta(hours=1), step_s=57)
    store.ingest(pl.concat([late, samples([0.0], uuid="GPU-2")]), source="b")
    table = store.devices().sort("uuid")
    assert table.select("uuid", "rows", "step_ms").rows() == [("GPU-1", 8, 57_000), ("GPU-2", 1, None)]
    assert table["last"][0] == EIGHT + timedelta(hours=1, seconds=114)


def test_offsets_from_the_table_find_the_rows_of_a_device(store: SampleStore, samples: Samples) -> None:
    """A reader slices a part by the running sum of ``rows``."""
    store.ingest(pl.concat([samples([float(n)] * (n + 1), uuid=f"GPU-{n}") for n in range(4)]), source="a")
    (part,) = store.parts()
    assert part.single
    whole = pl.read_parquet(part.path)
    start = 0
    for row in part.devices().iter_rows(named=True):
        mine = whole[start : start + row["rows"]]
        assert set(mine["device"]) == {row["device"]}
        assert set(mine["uuid"]) == {row["uuid"]}
        assert mine["time"].is_sorted()
        start += row["rows"]
    assert start == part.rows == len(whole)


def test_job_labels_are_found_without_reading_samples(store: SampleStore, samples: Samples) -> None:
    """One row per run of consecutive samples that carry the id; a shared GPU has rows for both."""
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
def test_a_gpu_known_by_index_takes_the_uuid_that_the_node_tells(
    store: SampleStore, samples: Samples, first: str
) -> None:
    """dmon knows indices, dcgm-exporter UUIDs: they are one device, whichever comes first."""
    by_index = samples([None, 5.0], uuid=None, index=0, power_w=70.0)
    by_uuid = samples([4.0], index=0, pci="00000000:07:00.0")
    for frame in (by_index, by_uuid) if first == "index" else (by_uuid, by_index):
        store.ingest(frame, source="x")
    whole = store.scan().collect()
    assert whole.select("uuid", "util_pct", "power_w").rows() == [("GPU-1", 4.0, 70.0), ("GPU-1", 5.0, 70.0)]
    assert store.devices()["device"].to_list() == [device_id("alpha", "gpu01", "GPU-1", None, None, None)]


def test_a_gpu_known_by_pci_address_takes_the_uuid(store: SampleStore, samples: Samples) -> None:
    """And one known by index takes it by way of the address."""
    store.ingest(samples([1.0], uuid=None, pci="00000000:07:00.0", index=0), source="a")
    store.ingest(samples([2.0], uuid=None, index=0, start=EIGHT + timedelta(minutes=1)), source="b")
    assert len(store.devices()) == 1
    store.ingest(samples([3.0], pci="00000000:07:00.0", start=EIGHT + timedelta(minutes=2)), source="c")
    assert store.scan().collect().select("uuid", "util_pct").rows() == [("GPU-1", 1.0), ("GPU-1", 2.0), ("GPU-1", 3.0)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_sources_that_know_a_gpu_by_different_marks_come_in_any_order(
    store: SampleStore, samples: Samples, order: tuple[int, ...]
) -> None:
    """One gives the index, one the address, one the UUID with the address, and only one all of them."""
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


def test_an_index_that_two_gpus_had_on_a_day_is_adopted_by_none(store: SampleStore, samples: Samples) -> None:
    """A GPU was changed: the index alone does not tell which."""
    store.ingest(pl.concat([samples([1.0], index=0), samples([2.0], uuid="GPU-2", index=0)]), source="a")
    store.ingest(samples([3.0], uuid=None, index=0), source="b")
    assert len(store.devices()) == 3


def test_days_before_a_date_are_deleted(store: SampleStore, samples: Samples) -> None:
    """Retention: the directories go too."""
    for day in (1, 2, 3):
        store.ingest(samples([1.0], start=datetime(2026, 11, day, 8, tzinfo=UTC)), source="a")
    assert store.delete_before(date(2026, 11, 3)) == [DAY, date(2026, 11, 2)]
    assert store.days() == [date(2026, 11, 3)]
    assert SampleStore(store.root / "none").delete_before(DAY) == []
    store.close()
    store.delete_before(date(2026, 11, 3))
    store.ingest(samples([1.0], start=datetime(2026, 11, 3, 8, tzinfo=UTC)), source="a")
    assert [path.name for path in store.root.glob("day=*")] == ["day=2026-11-03"]


def test_a_day_can_be_written_from_columns_that_are_in_order(store: SampleStore) -> None:
    """For generated histories: no ingest, several frames, a device that goes on in the next."""
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
    assert [one.rows for one in store.parts()] == [again.rows] == [50]


def test_samples_without_a_node_are_a_fault_of_the_reader(store: SampleStore, samples: Samples) -> None:
    """They could be joined to nothing."""
    with pytest.raises(ValueError, match="node"):
        store.ingest(samples([1.0], node=None), source="a")


def test_an_empty_history_answers_with_nothing(store: SampleStore) -> None:
    """Reading makes nothing on disk."""
    assert (store.days(), store.parts(), store.span(), store.sources()) == ([], [], None, frozenset())
    assert store.scan().collect().is_empty()
    assert store.devices().is_empty()
    assert not store.root.exists()
    with store.writer():
        pass
    assert store.days() == []


_value = st.one_of(st.none(), st.integers(0, 3).map(float))
_row = st.tuples(st.integers(0, 1), st.integers(0, 4), _value, _value, st.sampled_from([None, "1", "2", "1,3"]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(_row, max_size=6), min_size=1, max_size=4))
def test_whatever_is_read_in_whichever_pieces_the_rule_holds(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[int, int, float | None, float | None, str | None]]],
) -> None:
    """The history is the fold of all rows by the merge rule, however they are cut into files. A row without a value
    stays."""
    store = SampleStore(tmp_path_factory.mktemp("fold"))
    expected: dict[tuple[str, datetime], dict[str, object]] = {}
    with writer.Writer(store.root, rows_at_once=3) as session:
        for number, rows in enumerate(batches):
            frame = pl.DataFrame(
                [("a", "n", f"GPU-{g}", EIGHT + timedelta(seconds=t), u, p, j) for g, t, u, p, j in rows],
                schema={"cluster": pl.String, "node": pl.String, "uuid": pl.String,
                        "time": pl.Datetime("ms", "UTC"), "util_pct": pl.Float32, "power_w": pl.Float32,
                        "job": pl.String}, orient="row",
            )  # fmt: skip
            session.add([frame], Source(str(number)))
            for g, t, u, p, j in rows:
                known = expected.setdefault((f"GPU-{g}", EIGHT + timedelta(seconds=t)), dict.fromkeys(("u", "p", "j")))
                known["u"] = u if u is not None else known["u"]
                known["p"] = p if p is not None else known["p"]
                ids = {one for one in f"{known['j'] or ''},{j or ''}".split(",") if one}
                known["j"] = ",".join(sorted(ids)) or None
    whole = store.scan().collect()
    found = {
        (row["uuid"], row["time"]): {"u": row["util_pct"], "p": row["power_w"], "j": row["job"]}
        for row in whole.iter_rows(named=True)
    }
    assert found == expected
    assert len(whole) == len(expected)
    assert set(METRICS) <= set(whole.columns)


def test_tables_of_years_of_days_are_read_some_hundred_at_a_time(
    store: SampleStore, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polars may take more than 512 files that wait at once for a deadlock, and says so on standard error."""
    store.ingest(samples([1.0]), source="a")
    (part,) = store.parts()
    asked: list[int] = []
    collect = pl.collect_all
    monkeypatch.setattr(pl, "collect_all", lambda frames: asked.append(len(frames)) or collect(frames))
    assert len(read_tables([part.files] * 550)) == 550
    assert sum(asked) == 1100
    assert max(asked) < 512


def test_each_flipped_bit_of_the_small_tables_is_damage(store: SampleStore, samples: Samples) -> None:
    """And none reaches the decoder, which some damage would end together with the process."""
    store.ingest(samples([1.0, 2.0], job="7"), source="a")
    (part,) = store.parts()
    for path, read in ((part.files.devices, part.devices), (part.files.jobs, part.jobs)):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(UnreachableError, match=f"{path}: .* not what was written"):
                read()
        path.write_bytes(whole)
        assert len(read()) == 1


def test_a_history_without_digests_is_read(store: SampleStore, samples: Samples) -> None:
    """As an earlier release wrote it; what is damaged there the decoder finds. The next change notes the version."""
    store.ingest(samples([1.0, 2.0], job="7"), source="a")
    path = store.root / manifest.FILE
    said = json.loads(path.read_text())
    for entry in said["days"]["2026-11-01"]:
        del entry["devices_digest"], entry["jobs_digest"]
    path.write_text(json.dumps({**said, "version": 1}))
    assert len(store.devices()) == 1
    (part,) = store.parts()
    part.files.jobs.write_bytes(b"PAR1")
    with pytest.raises(UnreachableError, match="jobs-"):
        part.jobs()
    store.ingest(samples([3.0], node="gpu02", uuid="GPU-2"), source="b")
    assert json.loads(path.read_text())["version"] == manifest.VERSION


@pytest.mark.parametrize("apart_s", [0.1, 5.0, 12.0])
@pytest.mark.parametrize("more", [0, 1])
def test_two_sources_that_take_turns(store: SampleStore, samples: Samples, apart_s: float, more: int) -> None:
    """The time between them is no sampling step: else what lies between two of its samples would be a gap."""
    store.ingest(samples([5.0] * 40), source="dcgm")
    store.ingest(samples([5.0] * (39 + more), start=EIGHT + timedelta(seconds=apart_s)), source="nvidia-smi")
    (step,) = store.devices()["step_ms"]
    assert 3 * step >= 30_000 - apart_s * 1000
    assert step <= 30_000


def test_gaps_and_bursts_do_not_change_the_step(store: SampleStore, samples: Samples) -> None:
    """Samples in threes with pauses: the step is that within them."""
    for number in range(8):
        store.ingest(samples([5.0] * 3, start=EIGHT + timedelta(seconds=600 * number)), source=str(number))
    assert store.devices()["step_ms"].to_list() == [30_000]


def test_an_ingest_into_a_day_with_a_damaged_part_says_so(store: SampleStore, samples: Samples) -> None:
    """One line that names the file; the new samples are there, beside the damaged ones."""
    store.ingest(samples([1.0] * 200), source="a")
    (part,) = store.parts()
    whole = part.path.read_bytes()
    part.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreachableError, match=rf"{part.path}: the GPU history cannot be read: [^\n]+$"):
        store.ingest(samples([2.0], node="gpu02", uuid="GPU-2"), source="b")
    assert part.path.exists()
    assert len(store.parts()) == 2
