"""The same data in every format: equal samples, and equal hours in the analysis."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from fake_http import Answer, Question, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import waste
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.gpu.sampler import COLUMNS
from slurm_affinode.metrics import aliases, ingest, openmetrics, spool
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.prometheus import importer, queries
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
STEP_S = 30
BLANKS = ("NaN", "+Inf", "2147483632", "-1")
"""Ways in which a metric represents a missing value, including the blank values of DCGM."""
OPTIONS = ReadOptions(aliases=aliases.load(), zone=ZoneInfo("UTC"), node="gpu01")

Value = float | None
History = Sequence[Sequence[tuple[Value, Value]]]
"""For each GPU (by index) and time, utilization in percent and framebuffer in MiB; None: not measured."""
Write = Callable[[History, Path], Path]


def uuid(gpu: int) -> str:
    """Return the UUID of a GPU."""
    return f"GPU-5c7e1b3a-0000-4000-8000-{gpu:012d}"


def moments(history: History) -> Iterator[tuple[datetime, int, Value, Value]]:
    """Yield time, GPU, utilization and framebuffer, in order of time."""
    for at in range(len(history[0])):
        for gpu, rows in enumerate(history):
            yield EIGHT + timedelta(seconds=STEP_S * at), gpu, *rows[at]


def text_of(value: Value, at: int, blanks: Sequence[str]) -> str:
    """Return the number, or one of ``blanks``."""
    return blanks[at % len(blanks)] if value is None else f"{value:g}"


def exposition(
    history: History, path: Path, *, stamp: Callable[[datetime], str], blanks: Sequence[str] = BLANKS,
    form: str = '{name}{{gpu="{gpu}",UUID="{uuid}",Hostname="gpu01"}} {value} {time}\n', end: str = "",
) -> Path:  # fmt: skip
    """Write all series; a missing utilization may have no line if the framebuffer is known."""
    lines = []
    for column, name in enumerate(("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED")):
        for number, (time, gpu, *values) in enumerate(moments(history)):
            if number % 2 and values[column] is None and values[1 - column] is not None:
                continue
            value = text_of(values[column], number // 2, blanks)
            lines.append(form.format(name=name, gpu=gpu, uuid=uuid(gpu), value=value, time=stamp(time)))
    path.write_text("".join(lines) + end)
    return path


def epoch(unit: int) -> Callable[[datetime], str]:
    """Return a function that formats times as integers with ``unit`` units per second."""
    return lambda time: str(round(time.timestamp()) * unit)


def table(history: History, path: Path, *, blanks: Sequence[str] = ("", "NaN", "N/A", "inf")) -> Path:
    """Write a wide CSV table."""
    rows = ["time,uuid,index,util_pct,fb_used_mib\n"]
    for number, (time, gpu, util, fb) in enumerate(moments(history)):
        cells = (text_of(value, number, blanks) for value in (util, fb))
        rows.append(f"{time.isoformat()},{uuid(gpu)},{gpu},{','.join(cells)}\n")
    path.write_text("".join(rows))
    return path


def long_table(history: History, path: Path) -> Path:
    """Write a CSV table with one row per measurement."""
    rows = ["time,uuid,index,metric,value\n"]
    for number, (time, gpu, util, fb) in enumerate(moments(history)):
        for name, value in (("DCGM_FI_DEV_GPU_UTIL", util), ("DCGM_FI_DEV_FB_USED", fb)):
            rows.append(f"{time.isoformat()},{uuid(gpu)},{gpu},{name},{text_of(value, number, BLANKS)}\n")
    path.write_text("".join(rows))
    return path


def answer(history: History, start: int = 0, until: int | None = None) -> dict[str, Any]:
    """Return the response of Prometheus for the times with index from ``start`` to ``until`` (exclusive)."""
    result = []
    for column, name in enumerate(("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED")):
        for gpu, rows in enumerate(history):
            metric = {"__name__": name, "gpu": str(gpu), "UUID": uuid(gpu), "Hostname": "gpu01"}
            values = [
                [EIGHT.timestamp() + STEP_S * (start + at), text_of(row[column], at, BLANKS)]
                for at, row in enumerate(rows[start:until])
            ]
            result.append({"metric": metric, "values": values})
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def prometheus_json(history: History, path: Path) -> Path:
    """Write a saved response to a range query."""
    path.write_text(json.dumps(answer(history)))
    return path


def smi(history: History, path: Path) -> Path:
    """Write a log of nvidia-smi."""
    rows = ["timestamp, uuid, index, utilization.gpu [%], memory.used [MiB]\n"]
    for number, (time, gpu, util, fb) in enumerate(moments(history)):
        missing = ("[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU is lost]")[number % 4]
        cells = (missing if value is None else f"{value:g} {unit}" for value, unit in ((util, "%"), (fb, "MiB")))
        rows.append(f"{time:%Y/%m/%d %H:%M:%S.000}, {uuid(gpu)}, {gpu}, {', '.join(cells)}\n")
    path.write_text("".join(rows))
    return path


def dmon(history: History, path: Path) -> Path:
    """Write output of ``dcgmi dmon`` piped through ``ts``."""
    rows = ["#Entity   GPUTL  FBUSD\n"]
    for time, gpu, util, fb in moments(history):
        cells = ("N/A" if value is None else f"{value:.3f}" for value in (util, fb))
        rows.append(f"{time:%Y-%m-%dT%H:%M:%S+0000} GPU {gpu}  {'  '.join(cells)}\n")
    path.write_text("".join(rows))
    return path


def parquet(history: History, path: Path) -> Path:
    """Write the columns of the sample schema; missing values are null or NaN."""
    rows = [
        {"time": time, "uuid": uuid(gpu), "index": gpu,
         "util_pct": (None if number % 2 else math.nan) if util is None else util, "fb_used_mib": fb}
        for number, (time, gpu, util, fb) in enumerate(moments(history))
    ]  # fmt: skip
    schema = {"time": SAMPLES["time"], "uuid": pl.String(), "index": pl.Int64(), "util_pct": pl.Float64(),
              "fb_used_mib": pl.Float32()}  # fmt: skip
    pl.DataFrame(rows, schema=schema).write_parquet(path)
    return path


def spooled(history: History, path: Path) -> Path:
    """Write a completed file of the agent's spool."""
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for time, gpu, util, fb in moments(history):
            writer.writerow({
                "node": "gpu01", "uuid": uuid(gpu), "index": gpu, "util_pct": util, "fb_used_mib": fb,
                "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            })  # fmt: skip
    return spool.to_parquet(path.with_suffix(".csv"))


FORMATS: dict[str, Write] = {
    "prometheus": lambda history, path: exposition(history, path, stamp=epoch(1000)),
    "openmetrics": lambda history, path: exposition(
        history, path, stamp=lambda time: f"{time.timestamp():.3f}", end="# EOF\n"
    ),
    "promtool dump": lambda history, path: exposition(
        history, path, stamp=epoch(1000), blanks=("NaN",),
        form='{{__name__="{name}", gpu="{gpu}", UUID="{uuid}", Hostname="gpu01"}} {value} {time}\n',
    ),
    "wide csv": table,
    "long csv": long_table,
    "prometheus-json": prometheus_json,
    "nvidia-smi": smi,
    "dmon": dmon,
    "parquet": parquet,
    "spool": spooled,
}  # fmt: skip


def from_files(history: History, directory: Path, write: Write) -> SampleStore:
    """Return a sample store of ``history``, ingested from a file."""
    store = SampleStore(directory / "history")
    summary = ingest.ingest_files(store, [write(history, directory / "samples")], OPTIONS)
    assert [(file.error, file.problems) for file in summary.files] == [(None, ())]
    return store


def from_server(history: History, directory: Path) -> SampleStore:
    """Return a sample store of ``history``, ingested from a Prometheus server in windows of over an hour."""
    begin = round(EIGHT.timestamp())

    def judge(question: Question) -> Answer:
        if question[1].endswith("/values"):
            return Answer(json.dumps({"status": "success", "data": ["DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"]}))
        query, until = question[2]["query"][0], math.floor(float(question[2]["time"][0]))
        name, span_s = re.findall(r"^(\w+)\[(\d+)s\]$", query)[0]
        first, behind = (max(0, -(-(time - begin) // STEP_S)) for time in (until - int(span_s) + 1, until + 1))
        whole = answer(history, first, behind)
        kept = [item for item in whole["data"]["result"] if item["metric"]["__name__"] == name and item["values"]]
        whole["data"]["result"] = kept
        return Answer(json.dumps(whole))

    store = SampleStore(directory / "history")
    question = queries.Question(begin * 1000, (begin + STEP_S * len(history[0])) * 1000)
    with serving(judge=judge) as fake:
        outcome = importer.ingest(store, Client(Server(fake.url), sleep=lambda seconds: None), question, OPTIONS)
    assert outcome.failure is None
    return store


def exported(history: History, directory: Path) -> SampleStore:
    """Return a sample store of ``history`` after ingest, export as OpenMetrics, and ingest."""
    (directory / "first").mkdir()
    out = BytesIO()
    store = from_files(history, directory / "first", parquet)
    openmetrics.write(store, EIGHT, EIGHT + timedelta(days=1), out)

    def write(_: History, path: Path) -> Path:
        path.write_bytes(out.getvalue())
        return path

    return from_files(history, directory, write)


def hours(store: SampleStore, history: History) -> list[tuple[float, ...]]:
    """Return idle, low, busy and unknown hours of one job per GPU that holds it all the time."""
    end = EIGHT + timedelta(seconds=STEP_S * len(history[0]))
    runs = [
        {"cluster": "default", "job_id": gpu, "submit": EIGHT, "start": EIGHT, "end": end, "user": "ann", "nodes": 1,
         "node_list": "gpu01", "gpus": 1, "state": "COMPLETED"}
        for gpu in range(len(history))
    ]  # fmt: skip
    recorded = [
        {"cluster": "default", "job_id": gpu, "start": EIGHT, "node": "gpu01", "gpu": str(gpu)}
        for gpu in range(len(history))
    ]
    jobs, gpus = (
        pl.DataFrame({name: pl.Series([row.get(name) for row in rows], dtype=dtype) for name, dtype in schema.items()})
        for rows, schema in ((runs, JOBS), (recorded, ALLOCATION_GPUS))
    )
    result = waste.analyse(WasteQuery(EIGHT, end), jobs, gpus, store, now=end).jobs.sort("job_id")
    names = [f"gpu_hours_{name}" for name in ("idle", "low", "busy", "unknown")]
    return list(result.select(pl.col(name).fill_null(0.0) for name in names).iter_rows())


def four_hours() -> History:
    """Return six GPUs with zeros, values and missing values in various patterns."""
    count = 4 * 3600 // STEP_S

    def gpu(util: Callable[[int], Value], fb: Callable[[int], Value] = lambda at: 1024.0) -> list[tuple[Value, Value]]:
        return [(util(at), fb(at)) for at in range(count)]

    def third(at: int) -> Value:
        return 0.0 if at % 3 == 0 else None

    def stretch(at: int) -> Value:
        return None if 100 <= at < 340 else 0.0

    def edges(at: int) -> Value:
        return None if at < 7 or at > count - 9 else (0.0, 2.0, 75.0, None)[at // 20 % 4]

    return [
        gpu(third, lambda at: None if third(at) is None else 5.0),
        gpu(third),
        gpu(stretch, lambda at: None if stretch(at) is None else 7.0),
        gpu(stretch),
        gpu(edges),
        gpu(lambda at: None, lambda at: None),
    ]


@pytest.mark.parametrize("name", [*FORMATS, "server", "exported"])
def test_hours_are_equal_in_all_formats(name: str, tmp_path: Path) -> None:
    """A sample without a value is unknown time, counts for the sampling interval, and never extends an idle sample."""
    history = four_hours()
    if name in FORMATS:
        store = from_files(history, tmp_path, FORMATS[name])
    else:
        store = (from_server if name == "server" else exported)(history, tmp_path)
    # In four hours at 30 s: 160 of 480 are zeros; 240 have no value; the values of ``edges``; nothing at all.
    third, stretch = (4 / 3, 0, 0, 8 / 3), (2.0, 0, 0, 2.0)
    known = [util for util, _ in history[4]]
    edges = (known.count(0) / 120, known.count(2) / 120, known.count(75) / 120, known.count(None) / 120)
    expected = [third, third, stretch, stretch, edges, (0, 0, 0, 4.0)]
    assert hours(store, history) == [pytest.approx(row, abs=1e-5) for row in expected]


_value = st.none() | st.sampled_from([0.0, 0.5, 1.0, 3.0, 50.0, 100.0])
_history = st.integers(1, 8).flatmap(
    lambda count: st.lists(st.lists(st.tuples(_value, _value), min_size=count, max_size=count), min_size=1, max_size=3)
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_history)
def test_samples_are_equal_in_all_formats(tmp_path_factory: pytest.TempPathFactory, history: History) -> None:
    """There is one row per GPU and time, and every blank value is missing."""
    expected = [(gpu, time, util, fb) for time, gpu, util, fb in moments(history)]
    for name, write in FORMATS.items():
        path = write(history, tmp_path_factory.mktemp("any") / "samples")
        notes = ReadingNotes(path.name)
        _, frames = inputs.read_file(path, OPTIONS, notes)
        rows = pl.concat([pl.DataFrame(schema=SAMPLES), *frames]).sort("time", "index")
        assert list(rows.select("index", "time", "util_pct", "fb_used_mib").iter_rows()) == expected, name
        assert not notes.problems, name
