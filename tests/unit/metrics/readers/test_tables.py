"""CSV tables and nvidia-smi logs: columns, times, and invalid input."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.errors import ConfigError, InputError
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.tables import Ticks

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Reader = Callable[..., Any]
UUID = "GPU-5c7e1b3a-0000-4000-8000-000000000000"


def test_nvidia_smi_log_is_read(read: Reader, recorded: Path) -> None:
    """Covers units in the header and after values, texts for unsupported values, repeated headers after a restart."""
    result = read(recorded / "gpu" / "nvidia-smi-gpu01.csv")
    assert result.format == "nvidia-smi"
    zero = [row for row in result.rows if row["index"] == 0]
    assert [row["util_pct"] for row in zero] == [97.0, None, 0.0]
    assert [row["power_w"] for row in result.rows if row["index"] == 1] == [None, None, 57.0]
    assert zero[0]["time"] == EIGHT + timedelta(milliseconds=123)
    assert (zero[0]["node"], zero[0]["pci"], zero[0]["model"]) == ("gpu01", "00000000:07:00.0", "NVIDIA A100-SXM4-80GB")
    assert (zero[0]["fb_used_mib"], zero[0]["fb_total_mib"]) == (71000.0, 81920.0)
    assert result.notes.problem_count == 0


def test_nvidia_smi_without_header_needs_fields(read: Reader, recorded: Path) -> None:
    """It is the list given to ``--query-gpu``."""
    path = recorded / "gpu" / "nounits-noheader.csv"
    with pytest.raises(InputError, match="no header line") as caught:
        read(path, node="gpu01")
    assert "--fields" in str(caught.value.hint)
    fields = ("timestamp", "pci.bus_id", "utilization.gpu", "memory.used", "power.draw")
    rows = read(path, node="gpu01", fields=fields).rows
    assert [(row["util_pct"], row["fb_used_mib"]) for row in rows] == [(97.0, 71000.0), (96.0, 71000.0)]
    with pytest.raises(InputError, match="has 5 columns, --fields names 4"):
        read(path, node="gpu01", fields=fields[:4])


@pytest.mark.parametrize(
    ("fields", "cells"),
    [
        ("pstate, pcie.link.gen.max, temperature.gpu", "P0, 4, 33"),
        ("clocks.current.sm [MHz], clocks_throttle_reasons.active", "1410 MHz, 0x0000000000000001"),
        ("ecc.errors.uncorrected.volatile.total, retired_pages.pending, fan.speed [%]", "0, No, [N/A]"),
        ("compute_mode, persistence_mode, display_active, vbios_version", "Default, Enabled, Disabled, 92.00"),
    ],
)
def test_any_nvidia_smi_query_is_a_log(read: Reader, tmp_path: Path, fields: str, cells: str) -> None:
    """Any other fields may be present; the last line may be incomplete, since the log may still be written."""
    path = tmp_path / "gpu01.csv"
    row = f"2026/11/01 08:00:00.000, {UUID}, {cells}, 45 %"
    path.write_text(f"timestamp, uuid, {fields}, utilization.gpu [%]\n{row}\n{row[:40]}")
    result = read(path)
    assert result.format == "nvidia-smi"
    assert [row["util_pct"] for row in result.rows] == [45.0]


@pytest.mark.parametrize(
    "time",
    [
        "-5", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00",
        "9e15", "4200000000", "9" * 24,
    ],
)  # fmt: skip
def test_implausible_time_is_a_bad_line(read: Reader, tmp_path: Path, time: str) -> None:
    """A number that is not a time, or a sentinel of a database, would create a day of its own."""
    path = tmp_path / "s.csv"
    path.write_text(f"time,node,uuid,util\n{time},n1,{UUID},5\n1793520000,n1,{UUID},6\n")
    result = read(path)
    assert [row["util_pct"] for row in result.rows] == [6.0]
    assert [(problem.line, problem.reason) for problem in result.notes.problems] in (
        [(2, f"the time is out of range: time is {time!r}")],
        [(2, f"the time cannot be read: time is {time!r}")],
    )


@pytest.mark.parametrize("time", ["Infinity", "1e300", "-5", "NaN", '"soon"'])
def test_invalid_time_in_prometheus_series_is_reported(read: Reader, tmp_path: Path, time: str) -> None:
    """The series is skipped and reported, the others are read."""
    path = tmp_path / "range.json"
    labels = [f'{{"__name__": "DCGM_FI_DEV_GPU_UTIL", "Hostname": "n1", "gpu": "{gpu}"}}' for gpu in (0, 1)]
    series = [
        f'{{"metric": {label}, "values": [[{at}, "5"]]}}' for label, at in zip(labels, (time, 1793520000), strict=True)
    ]
    path.write_text(f'{{"status": "success", "data": {{"resultType": "matrix", "result": [{", ".join(series)}]}}}}')
    result = read(path)
    assert [row["index"] for row in result.rows] == [1]
    assert "not pairs of time and value" in result.notes.problems[0].reason


def test_log_with_changing_columns_is_read(read: Reader, tmp_path: Path) -> None:
    """The logger was restarted with the fields in another order: a new header applies from its line on."""
    path = tmp_path / "gpu01.log"
    path.write_text(
        "timestamp, uuid, utilization.gpu [%], memory.used [MiB]\n"
        f"2026/11/01 08:00:00.000, {UUID}, 12 %, 100 MiB\n"
        "timestamp, uuid, memory.used [MiB], utilization.gpu [%]\n"
        f"2026/11/01 08:00:30.000, {UUID}, 100 MiB, 12 %\n"
        "timestamp, uuid, memory.used [MiB], power.draw [W], utilization.gpu [%]\n"
        f"2026/11/01 08:01:00.000, {UUID}, 100 MiB, 60.50 W, 12 %\n"
    )
    result = read(path)
    assert [(row["util_pct"], row["fb_used_mib"]) for row in result.rows] == [(12.0, 100.0)] * 3
    assert [row["power_w"] for row in result.rows] == [None, None, 60.5]
    assert result.notes.problem_count == 0
    assert result.notes.decisions == {"node name taken from the path: gpu01": 1}


@pytest.mark.parametrize(
    ("header", "cells", "expected"),
    [
        ("job,hpc_job,uuid", "dcgm-exporter,4711,GPU-1", {"job": "4711", "uuid": "GPU-1"}),
        ("job,uuid", "dcgm-exporter,GPU-1", {"job": None}),
        ("job,uuid", "4711_3,GPU-1", {"job": "4711_3"}),
        ("gpu_id,uuid", "3,GPU-1", {"uuid": "GPU-1", "index": 3}),
        ("gpu_id,gpu_name", "GPU-1,NVIDIA L40S", {"uuid": "GPU-1", "model": "NVIDIA L40S"}),
        ("gpu_id,gpu", "GPU-1,2", {"uuid": "GPU-1", "index": 2}),
    ],
)
def test_ambiguous_columns_are_resolved(
    read: Reader, tmp_path: Path, header: str, cells: str, expected: dict[str, Any]
) -> None:
    """The more specific name wins: ``job`` may be the scrape job of Prometheus, and ``gpu_id`` may be a number."""
    path = tmp_path / "export.csv"
    path.write_text(f"time,node,{header},util\n1793520000,n1,{cells},5\n")
    row = read(path).rows[0]
    assert {name: row[name] for name in expected} == expected


def test_unit_in_brackets_overrides_the_default_unit(read: Reader, tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_text("time,node,uuid,gpu_util [ratio],sm_active [%]\n1793520000,n1,GPU-1,0.5,25\n")
    row = read(path).rows[0]
    assert (row["util_pct"], row["sm_active"]) == (50.0, 0.25)


@pytest.mark.parametrize(
    ("header", "values", "expected"),
    [
        ("utilization", (0, 0.17, 0.85), 2), ("utilization", (0, 0.17, 1.5), 0), ("utilization", (0, 0, 1), 0),
        ("utilization [%]", (0, 0.17, 0.85), 0), ("utilization [ratio]", (0, 0.17, 0.85), 0),
    ],
)  # fmt: skip
def test_utilization_that_may_be_a_ratio_is_reported(
    read: Reader, tmp_path: Path, header: str, values: tuple[float, ...], expected: int
) -> None:
    """It is read as percent unless the column has another unit; a ratio would look almost idle."""
    path = tmp_path / "gpu01.csv"
    rows = (f"{1793520000 + 30 * at},3,{value}\n" for at, value in enumerate(values))
    path.write_text(f"time,gpu,{header}\n" + "".join(rows))
    decisions = {what: count for what, count in read(path).notes.decisions.items() if "ratio" in what}
    assert list(decisions.values()) == [expected] * bool(expected)


def test_log_with_unfinished_last_line_is_read(read: Reader, recorded: Path, tmp_path: Path) -> None:
    """The log is still being written: the unfinished line is reported, the lines before it are read."""
    text = (recorded / "gpu" / "nvidia-smi-gpu01.csv").read_text()
    path = tmp_path / "gpu01.csv"
    path.write_text(text[:-60])
    result = read(path)
    assert len(result.rows) == 5
    assert "unfinished" in result.notes.problems[0].reason


def test_table_with_unfinished_last_line_is_rejected(read: Reader, tmp_path: Path) -> None:
    """A CSV export is either complete or truncated."""
    path = tmp_path / "gpu01.csv"
    path.write_text("time,uuid,util_pct,power_w\n1793520000,GPU-1,5,60\n1793520030,GPU-1")
    with pytest.raises(InputError, match=r"gpu01\.csv:3: is cut off"):
        read(path)


def test_configured_column_names_are_read(read: Reader, recorded: Path) -> None:
    """The configuration maps columns to fields, with a unit if it differs from that of the schema."""
    columns = {"Zeit": "time", "Knoten": "node", "Auslastung": "util_pct", "Speicher": "fb_used_mib:gib"}
    (row,) = read(recorded / "gpu" / "wide.csv", columns=columns).rows
    assert row["time"] == EIGHT - timedelta(hours=1)
    assert (row["util_pct"], row["fb_used_mib"], row["fb_total_mib"]) == (10.5, 1024.0, 40960.0)
    assert (row["node"], row["uuid"], row["job"]) == ("gpu01", UUID, "77")


def test_long_table_is_read(read: Reader, recorded: Path) -> None:
    """There is one row per measurement: metrics with equal time are one sample, an empty value is missing."""
    result = read(recorded / "gpu" / "long.csv")
    assert [(row["util_pct"], row["fb_used_mib"]) for row in result.rows] == [(5.0, 1024.0), (None, 2048.0)]
    assert dict(result.notes.unknown) == {"something_else": 1}


def test_text_in_utf16_is_read(read: Reader, tmp_path: Path) -> None:
    """Windows programs write it; it can be compressed."""
    path = tmp_path / "gpu01.csv"
    data = "time,gpu,name,util\r\n1793520000,3,é,7\r\n".encode("utf-16")
    for content in (data, gzip.compress(data)):
        path.write_bytes(content)
        assert [(row["model"], row["util_pct"]) for row in read(path).rows] == [("é", 7.0)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiter_is_detected(read: Reader, tmp_path: Path, delimiter: str) -> None:
    """Quoted names may contain it."""
    path = tmp_path / "gpu01.csv"
    rows = [["time", "gpu", "name", "util"], ["1793520000", "3", f'"A{delimiter}B"', "7"]]
    path.write_text("\n".join(delimiter.join(row) for row in rows))
    (row,) = read(path).rows
    assert (row["index"], row["model"], row["util_pct"]) == (3, f"A{delimiter}B", 7.0)


@pytest.mark.parametrize("before", ["sep=,\n", '"sep=,"\n', "# of rack 3, 2026\n\n#\n", "#group,false,true\n", "\n\n"])
def test_lines_before_the_table_are_skipped(read: Reader, tmp_path: Path, before: str) -> None:
    """Covers Excel's separator line and comments; a header may begin with ``#``; skipped lines count as lines."""
    path = tmp_path / "gpu01.csv"
    for mark in ("", "#"):
        path.write_text(f"{before}{mark}time,gpu,util\n1793520000,3,7\n1793520030,3\n1793520060,3,9\n")
        result = read(path)
        assert [(row["index"], row["util_pct"]) for row in result.rows] == [(3, 7.0), (3, 9.0)]
        assert [problem.line for problem in result.notes.problems] == [before.count("\n") + 3]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("1793520030,GPU-1", "has 2 columns"),
        ("1793520030,GPU-1,high", "util_pct is 'high'"),
        ("yesterday,GPU-1,5", "the time cannot be read: time is 'yesterday'"),
        ("2026-02-30T08:00:00,GPU-1,5", "the time cannot be read"),
        ("1793520030,,5", "names no GPU"),
    ],
)
def test_bad_row_is_reported_with_its_line(read: Reader, tmp_path: Path, bad: str, reason: str) -> None:
    """A quoted line feed before it does not shift the line number."""
    path = tmp_path / "gpu01.csv"
    end = "" if "columns" in reason else ",x"
    first = 'time,uuid,util_pct,"no\nte"\n1793520000,GPU-1,1,"two\nlines"\n'
    path.write_text(f"{first}{bad}{end}\n1793520060,GPU-1,2,x\n")
    result = read(path)
    assert [row["util_pct"] for row in result.rows] == [1.0, 2.0]
    (problem,) = result.notes.problems
    assert problem.line == 5
    assert reason in problem.reason
    with pytest.raises(InputError, match=r"gpu01\.csv:5"):
        read(path, strict=True)


def test_table_without_times_needs_start_and_interval(read: Reader, tmp_path: Path) -> None:
    """A new tick starts when a device occurs again."""
    path = tmp_path / "gpu01.csv"
    path.write_text("index, utilization.gpu [%]\n0, 1 %\n1, 2 %\n0, 3 %\n1, 4 %\n")
    with pytest.raises(InputError, match="has no times"):
        read(path)
    with pytest.raises(InputError, match=r"gpu01\.csv:4"):
        read(path, start=EIGHT)
    other = tmp_path / "gpu02.csv"
    other.write_text("when,index,util\n2026-11-01,0,1\n")
    with pytest.raises(InputError, match="no column is known to be the time; unknown: when"):
        read(other)
    rows = read(path, start=EIGHT, interval_s=10).rows
    assert [(row["index"], (row["time"] - EIGHT).seconds) for row in rows] == [(0, 0), (0, 10), (1, 0), (1, 10)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("time,uuid,temperature\n1,GPU-1,5\n", "no column is a GPU metric"),
        ("time,util_pct\n1,5\n", "no column names the GPU"),
        ("time,uuid,util_pct\n", "has a header and nothing else"),
    ],
)
def test_unusable_table_is_rejected(read: Reader, tmp_path: Path, text: str, what: str) -> None:
    """The error names what is missing."""
    path = tmp_path / "gpu01.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=what):
        read(path, format="csv")


def test_table_without_node_needs_one(read: Reader, tmp_path: Path) -> None:
    """Otherwise the node is taken from the name of the file or its directory."""
    path = tmp_path / "samples.csv"
    path.write_text("time,uuid,util_pct\n1793520000,GPU-1,5\n")
    with pytest.raises(InputError, match="does not name its node"):
        read(path)
    assert read(path, node="gpu07").rows[0]["node"] == "gpu07"


def test_site_aliases_extend_the_built_in_ones(tmp_path: Path) -> None:
    """They are read after the built-in table; unknown entries are errors that name file and key."""
    path = tmp_path / "aliases.toml"
    path.write_text('[metrics.util_pct]\nratio = ["my_busy"]\n[labels]\nnode = ["rack_host"]\n')
    table = aliases.load(path)
    metric = table.metric("MY-BUSY")
    assert metric is not None
    assert (metric.field, metric.factor) == ("util_pct", 100.0)
    assert table.labels["node"][0] == "rack_host"
    for text, what in [
        ('[metrics.heat]\npercent = ["x"]', r"aliases\.toml:1: metrics\.heat: unknown key"),
        ('[metrics.util_pct]\nfurlong = ["x"]', r"aliases\.toml:2: metrics\.util_pct\.furlong: unknown key"),
        ('[metrics.util_pct]\npercent = "x"', "list of strings"),
        ("metrics = 1", "metrics: a table is needed"),
        ("[", "aliases.toml"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=what):
            aliases.load(path)
    with pytest.raises(ConfigError, match="no such file"):
        aliases.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="'heat' is not a field"):
        aliases.load(columns={"x": "heat"})
    with pytest.raises(ConfigError, match="'stone' is not a unit"):
        aliases.load(columns={"x": "power_w:stone"})


def test_duplicate_columns_are_rejected(read: Reader, tmp_path: Path) -> None:
    """The table may have columns for each GPU; using the first one would silently drop the others."""
    path = tmp_path / "s.csv"
    path.write_text(f"time,node,uuid,note,note,Util,util\n1793520000,n1,{UUID},a,b,5,6\n")
    with pytest.raises(InputError, match=r"s\.csv: has 2 columns called Util"):
        read(path)
    path.write_text(f"time,node,uuid,note,note,util\n1793520000,n1,{UUID},a,b,5\n")
    assert [row["util_pct"] for row in read(path).rows] == [5]


def test_decimal_comma_is_read_with_semicolon_delimiter(read: Reader, tmp_path: Path) -> None:
    """Numbers with thousands separators are rejected."""
    path = tmp_path / "s.csv"
    rows = ["0,00;60,5 W", "99,5;1.234,5", ",5;71"]
    lines = [f"2026-11-01 08:00:{10 * at:02},25;n1;{UUID};{row}" for at, row in enumerate(rows)]
    path.write_text("\n".join(["time;node;uuid;util;power", *lines]))
    result = read(path)
    assert [(row["util_pct"], row["power_w"]) for row in result.rows] == [(0, 60.5), (0.5, 71)]
    assert [problem.reason for problem in result.notes.problems] == ["not a number: power is '1.234,5'"]


def test_implausible_values_are_dropped_and_reported(store: SampleStore, tmp_path: Path) -> None:
    """They would give a mean of 300 % or a silent gap; slightly exceeding values are noise and kept."""
    path = tmp_path / "s.csv"
    rows = ["1e300,0.5,10,200", "250,1.02,10,1e12", "7,55,1e11,inf", "nan,0.25,-1,9223372036854775792"]
    lines = [f"{1793520000 + 30 * at},n1,{UUID},{row}" for at, row in enumerate(rows)]
    path.write_text("\n".join(["time,node,uuid,util,sm_active,fb_used,power", *lines]))
    [file] = ingest_files(store, [path], ReadOptions(aliases.load())).files
    assert dict(file.decisions) == {
        "values of util_pct above 100 % are impossible and count as not measured": 2,
        "values of sm_active above 1 are impossible and count as not measured": 1,
        "values of fb_used_mib above 16,777,216 MiB are impossible and count as not measured": 1,
        "values of power_w above 100,000 W are impossible and count as not measured": 1,
    }
    frame = store.scan().sort("time").collect()
    assert frame["util_pct"].to_list() == [None, None, 7, None]
    assert frame["sm_active"].to_list() == pytest.approx([0.5, 1.02, None, 0.25])
    assert frame["fb_used_mib"].to_list() == [10, 10, None, None]
    assert frame["power_w"].to_list() == [200, None, None, None]


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=4))
def test_sample_without_a_time_ends_when_a_device_repeats(blocks: list[list[int]]) -> None:
    """Also if it continues in the next block."""
    options = ReadOptions(aliases=aliases.load(), start=EIGHT, interval_s=30)
    ticks, seen, number = Ticks(ReadingNotes("x"), options), set[int](), 0
    devices = [("c", "n", None, None, at, None, None, None) for at in range(4)]
    for block in blocks:
        expected = []
        for device in block:
            number, seen = (number + 1, {device}) if device in seen else (number, seen | {device})
            expected.append(EIGHT + timedelta(seconds=30 * number))
        at, numbers = pl.Series(block, dtype=pl.UInt32), pl.Series(range(len(block)), dtype=pl.Int64)
        assert ticks.times(devices, at, numbers).to_list() == expected
