"""Decoding of row groups for the compiled loops: the same values as Polars, for any file."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import samples, waste
from slurm_affinode.analysis.block import COLUMNS, Block, Pieces
from slurm_affinode.analysis.join import decoder, kernel, loops, row_groups
from slurm_affinode.analysis.join.compilation import machine_code, rebuilt
from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.analysis.segments import FAR, Allocations, build
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.metrics.parquet import parts
from slurm_affinode.metrics.parquet.parts import PartFiles
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import IDENTITY
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, empty

METRICS = COLUMNS[1:]
DAY_MS = 1_793_577_600_000
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

any_float = st.floats(width=32, allow_nan=False)
few_values = st.sampled_from([0.0, -0.0, 1.0, 99.0, 3.4028234663852886e38, 1.401298464324817e-45, float("inf")])
runs = st.integers(1, 40)


@st.composite
def column(draw: st.DrawFn, rows: int) -> list[float | None]:
    """Draw values that repeat, that differ, or that are missing: in stretches, individually, or throughout."""
    found: list[float | None] = []
    while len(found) < rows:
        kind, length = draw(st.integers(0, 4)), draw(runs)
        if kind == 0:
            found += [None] * length
        elif kind == 1:
            found += [draw(few_values)] * length
        elif kind == 2:
            found += [draw(st.one_of(st.none(), few_values)) for _ in range(min(length, 9))]
        else:
            found += [draw(any_float) for _ in range(min(length, 9))]
    return found[:rows]


@st.composite
def table(draw: st.DrawFn) -> pl.DataFrame:
    """Draw samples of one GPU within a day."""
    rows = draw(st.integers(1, 60))
    steps = draw(st.lists(st.sampled_from([1, 1000, 30_000, 30_000, 30_000, 600_000]), min_size=rows, max_size=rows))
    frame = {"time": [DAY_MS + t for t in itertools.accumulate(steps)]}
    frame |= {name: draw(st.one_of(column(rows), st.just([None] * rows))) for name in METRICS}
    return typed(frame)


def typed(frame: dict[str, Any]) -> pl.DataFrame:
    """Return a frame with the column types of stored samples."""
    return pl.DataFrame(frame, schema={"time": pl.Int64, **dict.fromkeys(METRICS, pl.Float32)}).with_columns(
        pl.col("time").cast(pl.Datetime("ms", "UTC"))
    )


def assert_same(path: Path, frame: pl.DataFrame, *, fallback: bool) -> None:
    """Assert that the decoded values are bit-identical to ``frame``; without ``fallback``, Polars must not be used."""
    decoder, at = row_groups.Decoder(), 0
    times = frame["time"].to_physical().to_list()
    refused = mock.Mock(side_effect=AssertionError("Polars was used"))
    with mock.patch.object(row_groups.RowGroup, "_by_polars", row_groups.RowGroup._by_polars if fallback else refused):
        for group in row_groups.of_part(path, 7, len(frame)):
            block = group.read(decoder)
            assert (block.row, len(block)) == (7 + at, len(group))
            part = frame[at : at + len(block)]
            at += len(block)
            assert block.time.tolist() == times[at - len(block) : at]
            assert block.next_time == (times[at] if at < len(times) else FAR)
            for name in METRICS:
                expected = part[name].fill_null(float("nan")).to_numpy()
                if name in block.columns:
                    assert block.columns[name].values.view(np.int32).tolist() == expected.view(np.int32).tolist(), name
                    assert block.columns[name].complete == (part[name].null_count() == 0)
                else:
                    assert np.isnan(expected).all()
    assert at == len(frame)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(table(), st.integers(1, 80))
def test_parts_of_the_writer_are_decoded_without_polars(frame: pl.DataFrame, row_group: int) -> None:
    """Covers repeated and missing values, extremes, metrics that are always missing, and several row groups."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(parts, "ROW_GROUP", row_group):
        path = written(Path(directory), frame)
        assert_same(path, frame, fallback=False)


def written(directory: Path, *frames: pl.DataFrame) -> Path:
    """Write a part with one device per frame."""
    identities = pl.DataFrame(
        {"device": range(len(frames)), "node": [f"n{number}" for number in range(len(frames))]},
        schema={"device": pl.UInt64, "node": pl.String},
    ).with_columns(pl.lit(None, dtype).alias(name) for name, dtype in IDENTITY.items() if name != "node")
    files = PartFiles.of(directory, "x")
    with parts.PartWriter(files, "x", identities) as writer:
        for number, frame in enumerate(frames):
            writer.write(frame.with_columns(pl.lit(number, pl.UInt64).alias("device")))
    return files.samples


def test_large_part_is_decoded(tmp_path: Path) -> None:
    """Covers full-size row groups, dictionaries that exceed their limit, and randomly missing values."""
    rng, rows = np.random.default_rng(1), 150_000
    frames = []
    for _ in range(3):
        metrics = {name: rng.random(rows, np.float32) for name in METRICS}
        metrics["util_pct"] = rng.integers(0, 101, rows).astype(np.float32)
        metrics["fb_used_mib"] = rng.integers(0, 80_000, rows).astype(np.float32)
        frame = typed({"time": DAY_MS + np.cumsum(rng.integers(1, 999, rows)), **metrics})
        gone = {name: rng.random(rows) < 0.3 for name in ("sm_active", "fb_used_mib")}
        frames.append(
            frame.with_columns(
                pl.when(pl.Series(where)).then(None).otherwise(pl.col(name)).alias(name) for name, where in gone.items()
            )
        )
    assert_same(written(tmp_path, *frames), pl.concat(frames), fallback=False)


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(st.data())
def test_files_with_any_writer_settings_are_read(data: st.DataObject) -> None:
    """Covers other codecs, encodings, page versions, checksums, required columns and many pages."""
    frame = data.draw(table())
    draw = data.draw
    delta = draw(st.booleans())
    required = draw(st.booleans()) and not any(frame[name].has_nulls() for name in METRICS)
    coded = draw(st.sampled_from([True, False, ["util_pct", "fb_used_mib"]])) if not delta else ["util_pct"]
    arrow = frame.to_arrow()
    if required:
        arrow = arrow.cast(pa.schema([field.with_nullable(False) for field in arrow.schema]))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.parquet"
        pq.write_table(
            arrow, path,
            compression=draw(st.sampled_from(["lz4", "lz4", "lz4", "zstd", "snappy", "none"])),
            use_dictionary=coded,
            column_encoding={"time": "DELTA_BINARY_PACKED"} if delta else None,
            data_page_version=draw(st.sampled_from(["1.0", "1.0", "2.0"])),
            data_page_size=draw(st.sampled_from([64, 1000, None])),
            write_batch_size=draw(st.sampled_from([1, 16, 1024])),
            dictionary_pagesize_limit=draw(st.sampled_from([8, 64, 1 << 20])),
            write_statistics=draw(st.booleans()),
            write_page_checksum=draw(st.booleans()),
            row_group_size=draw(st.integers(1, 80)),
        )  # fmt: skip
        assert_same(path, frame, fallback=True)


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=300), st.booleans())
def test_any_times_are_decoded(times: list[int], few: bool) -> None:
    """Covers deltas of up to 64 bits, and sums that overflow 64 bits."""
    values = [t % 1000 if few else t for t in times]
    frame = pa.table({"time": pa.array(values, pa.int64())})
    sink = pa.BufferOutputStream()
    pq.write_table(frame, sink, compression="none", use_dictionary=False, data_page_size=1 << 30,
                   column_encoding={"time": "DELTA_BINARY_PACKED"})  # fmt: skip
    content = np.frombuffer(sink.getvalue(), np.uint8)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0).column(0)
    chunk = content[footer.data_page_offset : footer.data_page_offset + footer.total_compressed_size]
    out = np.empty(len(values), np.int64)
    # The page ends with the chunk; its start is found by trying each offset.
    for start in range(len(chunk)):
        if machine_code(decoder).deltas(chunk, start, len(values), out) == len(values) and out.tolist() == values:
            return
    raise AssertionError("not decoded")


@pytest.fixture(scope="module")
def checked() -> Iterator[Any]:
    """Compile the decoder with bounds checking: an index outside an array is an error."""

    def strict(function: Callable[..., Any], inline: bool) -> Callable[..., Any]:
        return numba.njit(boundscheck=True, error_model="numpy", inline="always" if inline else "never")(function)

    code = rebuilt(decoder, strict)
    with mock.patch.object(row_groups, "machine_code", {decoder: code}.__getitem__):
        yield code


@settings(max_examples=50, deadline=None, suppress_health_check=SLOW)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=12), st.integers(1, 120)), max_size=12))
def test_lz4_blocks_are_decompressed(checked: Any, pieces: list[tuple[bytes, int]]) -> None:
    """Covers literals and near, far and overlapping matches; a block with a wrong length is rejected."""
    content = b"".join(piece * times for piece, times in pieces)
    packed = np.frombuffer(pa.Codec("lz4_raw").compress(content, asbytes=True), np.uint8).copy()
    out = np.empty(len(content), np.uint8)
    assert checked.unpack(packed, out)
    assert out.tobytes() == content
    assert not checked.unpack(packed, np.empty(len(content) + 1, np.uint8))
    assert not len(content) or not checked.unpack(packed, out[:-1])


@settings(max_examples=50, deadline=None, suppress_health_check=SLOW)
@given(st.binary(max_size=80), st.integers(0, 300), st.integers(0, 6))
def test_decoding_arbitrary_bytes_stays_in_bounds(checked: Any, content: bytes, rows: int, entries: int) -> None:
    data = np.frombuffer(content, np.uint8).copy()
    out, times = np.empty(rows, np.float32), np.empty(rows, np.int64)
    checked.unpack(data, out.view(np.uint8))
    known = checked.count_known(data, 0, len(data), rows)
    assert decoder.MALFORMED <= known <= rows
    if known >= 0:
        checked.spread(data, 0, len(data), np.ones(known, np.float32), out)
        assert np.count_nonzero(out == 1) == known
    assert checked.look_up(data, 0, np.ones(entries, np.float32), out) in {decoder.MALFORMED, rows}
    checked.deltas(data, 0, rows, times)
    for header in (b"\x80\x01\x04", b"\x08\x01", b"\x80\x80\x04\x01"):
        front = header + bytes([rows & 127 | 128, rows >> 7])
        whole = np.frombuffer(front + content, np.uint8).copy()
        assert checked.deltas(whole, 0, rows, times) in {decoder.MALFORMED, rows}


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(table(), st.data())
def test_damaged_file_gives_values_or_one_error(checked: Any, frame: pl.DataFrame, data: st.DataObject) -> None:
    """Truncated or altered files never cause an out-of-bounds access, or an error other than ``UnreachableError``."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(parts, "ROW_GROUP", 20):
        path = written(Path(directory), frame)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
        decoder = row_groups.Decoder()
        # Polars' own reaction to damaged files is not tested here.
        asked = mock.Mock(side_effect=UnreachableError("damaged", hint=""))
        with mock.patch.object(samples, "rows_of", asked):
            try:
                for group in row_groups.of_part(path, 0, len(frame)):
                    block = group.read(decoder)
                    assert all(len(c.values) == len(block) for c in block.columns.values())
            except UnreachableError:
                pass


def test_row_count_mismatch_is_reported_as_damage(tmp_path: Path) -> None:
    """The row count is compared with the device table of the part."""
    path = written(tmp_path, typed({"time": [DAY_MS], **{name: [1.0] for name in METRICS}}))
    with pytest.raises(UnreachableError, match="1 samples instead of 2"):
        list(row_groups.of_part(path, 0, 2))


@pytest.mark.parametrize("code_of", [lambda module: module, machine_code], ids=["arrays", "compiled"])
def test_unordered_times_are_reported_as_damage(code_of: Callable[[Any], Any]) -> None:
    """The loops rely on the order of the times."""
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    held = Allocations.of(none, none, none, one)
    cells = build(held, taking_part=np.ones(1, np.bool_), since=0, until=1)
    pieces = Pieces(none, none, one * 3, one, np.ones(1), one, none, one * FAR * 2)
    for times in ([1, 3, 2], [1, 1, 2], [1, 2, 1 << 61]):
        block = Block(0, np.array(times, np.int64), {}, int(FAR))
        with pytest.raises(UnreachableError, match="not in order"):
            kernel.fold([block], pieces, held, cells, Thresholds(), code_of(loops))


def test_damaged_part_raises_one_error_with_compiled_loops(
    monkeypatch: pytest.MonkeyPatch,
    history: Callable[..., SampleStore],
    samples: Callable[..., list[dict[str, Any]]],
    jobs: Callable[..., pl.DataFrame],
    t0: datetime,
) -> None:
    """The error is the same as without compiled loops."""
    monkeypatch.setattr(kernel, "COMPILED_FROM_ROWS", 0)
    store = history(samples([30.0 * i for i in range(50)], util_pct=0.0))
    path = store.parts()[0].path
    content = path.read_bytes()
    path.write_bytes(b"PAR1" + b"\xff" * (len(content) // 3) + content[4 + len(content) // 3 :])
    query = WasteQuery(t0, t0 + timedelta(hours=1))
    with pytest.raises(UnreachableError, match="cannot be read"):
        waste.analyse(query, jobs({"start": 0, "end": 3600}), empty(ALLOCATION_GPUS), store, now=query.until)
