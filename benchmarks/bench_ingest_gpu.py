"""Ingest of GPU metrics, by format: ``python benchmarks/bench_ingest_gpu.py [SCRAPES] [--formats NAMES]``.

A synthetic cluster of 800 GPUs on 100 nodes is scraped every 30 s. Exposition text, OpenMetrics and the JSON of
Prometheus have nine metrics, tables have four. Outputs of nvidia-smi and dmon are of one node; dmon repeats its header
with each scrape. ``files`` are exposition files with one scrape of eight GPUs each.

Every format is read by the reader of the product, which returns samples with their identities, times and units, and by
a peer that only splits or decodes the same text. Times are CPU seconds of the process with all of its threads, so that
other work on the machine hardly affects them; the fastest of three runs counts. Ingests are timed with their writes,
each into a new store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow.parquet as pq
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from ratios import peak_gib, report

from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions

GPUS = 800
PER_NODE = 8
PEER_SCRAPES = 2
"""The parsers of prometheus_client are slower, so they get fewer lines."""
BEGIN = 1793520000
STEP_S = 30
METRICS = {
    "DCGM_FI_DEV_SM_CLOCK": "1410", "DCGM_FI_DEV_GPU_TEMP": "55", "DCGM_FI_DEV_POWER_USAGE": "312.417",
    "DCGM_FI_DEV_GPU_UTIL": "97", "DCGM_FI_DEV_FB_FREE": "10000", "DCGM_FI_DEV_FB_USED": "71000",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.953125", "DCGM_FI_PROF_DRAM_ACTIVE": "0.5", "DCGM_FI_DEV_XID_ERRORS": "0",
}  # fmt: skip
LABELS = [
    f'gpu="{gpu % 8}",UUID="GPU-{gpu:032x}",pci_bus_id="00000000:{gpu % 8 + 16:02X}:00.0",device="nvidia{gpu % 8}",'
    f'modelName="NVIDIA A100-SXM4-80GB",Hostname="node{gpu // 8:04d}.example.org",hpc_job="{4000 + gpu // 4}"'
    for gpu in range(GPUS)
]
SMI = "timestamp, uuid, utilization.gpu [%], memory.used [MiB], memory.total [MiB], power.draw [W]"


def exposition(path: Path, scrapes: int, gpus: int = GPUS, first: int = 0) -> None:
    """Write exposition text with comments."""
    with path.open("w") as file:
        for scrape in range(first, first + scrapes):
            stamp = (BEGIN + scrape * STEP_S) * 1000
            for name, value in METRICS.items():
                file.write(f"# HELP {name} help\n# TYPE {name} gauge\n")
                file.writelines(f"{name}{{{label}}} {value} {stamp}\n" for label in LABELS[:gpus])


def openmetrics(path: Path, scrapes: int) -> None:
    """Write the scrapes as one OpenMetrics text, by metric and series, as the format demands."""
    with path.open("w") as file:
        for name, value in METRICS.items():
            file.write(f"# TYPE {name} gauge\n# HELP {name} help\n")
            for label in LABELS:
                file.writelines(f"{name}{{{label}}} {value} {BEGIN + scrape * STEP_S}.0\n" for scrape in range(scrapes))
        file.write("# EOF\n")


def query_range(path: Path, scrapes: int) -> None:
    """Write a response of Prometheus."""
    names = [[pair.split("=") for pair in label.split(",")] for label in LABELS]
    result = [
        {
            "metric": {"__name__": name, **{key: text.strip('"') for key, text in label}},
            "values": [[BEGIN + scrape * STEP_S, value] for scrape in range(scrapes)],
        }
        for name, value in METRICS.items()
        for label in names
    ]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    path.write_text(json.dumps(answer, separators=(",", ":")))


def _rows(scrapes: int, gpus: int = GPUS) -> Iterator[tuple[datetime, int, int, int, float]]:
    """Yield time, GPU, utilization, used memory and power."""
    for scrape in range(scrapes):
        moment = datetime.fromtimestamp(BEGIN + scrape * STEP_S, UTC)
        for gpu in range(gpus):
            yield moment, gpu, (scrape * 7 + gpu) % 101, 1000 + (scrape + gpu) % 70_000, 60 + (scrape * gpu) % 3400 / 10


def table(path: Path, scrapes: int) -> None:
    """Write a CSV table with a row per GPU and time."""
    with path.open("w") as file:
        file.write("timestamp,hostname,uuid,gpu_util,fb_used,power\n")
        file.writelines(
            f"{moment:%Y-%m-%dT%H:%M:%SZ},node{gpu // 8:04d},GPU-{gpu:032x},{util},{used},{power:.1f}\n"
            for moment, gpu, util, used, power in _rows(scrapes)
        )


def nvidia_smi(path: Path, scrapes: int) -> None:
    """Write the CSV of an nvidia-smi query on one node."""
    with path.open("w") as file:
        file.write(f"{SMI}\n")
        file.writelines(
            f"{moment:%Y/%m/%d %H:%M:%S}.123, GPU-{gpu:032x}, {util} %, {used} MiB, 81920 MiB, {power:.2f} W\n"
            for moment, gpu, util, used, power in _rows(scrapes * GPUS // PER_NODE, PER_NODE)
        )


def dmon(path: Path, scrapes: int) -> None:
    """Write the output of ``dcgmi dmon`` on one node, with a header for each scrape."""
    with path.open("w") as file:
        for _, gpu, util, used, power in _rows(scrapes * GPUS // PER_NODE, PER_NODE):
            if not gpu:
                file.write("#Entity   GPUTL   FBUSD   POWER\nID                        W\n")
            file.write(f"GPU {gpu}     {util:<8d}{used:<8d}{power:<8.1f}\n")


def parquet(path: Path, scrapes: int) -> None:
    """Write the table as Parquet."""
    times, gpus, utils, used, power = zip(*_rows(scrapes), strict=True)
    pl.DataFrame(
        {
            "timestamp": times, "hostname": [f"node{gpu // 8:04d}" for gpu in gpus],
            "uuid": [f"GPU-{gpu:032x}" for gpu in gpus], "gpu_util": utils, "fb_used": used, "power": power,
        }
    ).write_parquet(path)  # fmt: skip


def _exposition_peer(text: str) -> None:
    for family in text_string_to_metric_families(text):
        assert family.samples


def _openmetrics_peer(text: str) -> None:
    for family in openmetrics_families(text):
        assert family.samples


def _dmon_peer(path: Path) -> None:
    names = ["entity", "id", "util", "used", "power"]
    assert len(pd.read_csv(path, sep=r"\s+", comment="#", names=names, engine="c"))


@dataclass(frozen=True, slots=True)
class Format:
    """A format, and the peer that reads the same text."""

    write: Callable[[Path, int], None]
    peer: Callable[[Path], object]
    named: str
    peer_scrapes: int | None = None
    """Number of scrapes for the peer; None: the same file."""


FORMATS = {
    "exposition": Format(
        exposition, lambda path: _exposition_peer(path.read_text()), "prometheus_client", PEER_SCRAPES
    ),
    "openmetrics": Format(
        openmetrics, lambda path: _openmetrics_peer(path.read_text()), "prometheus_client", PEER_SCRAPES
    ),
    "prometheus-json": Format(query_range, lambda path: json.loads(path.read_bytes()), "json"),
    "csv": Format(table, pl.read_csv, "Polars"),
    "nvidia-smi": Format(nvidia_smi, pl.read_csv, "Polars"),
    "dmon": Format(dmon, _dmon_peer, "pandas"),
    "parquet": Format(parquet, pq.read_table, "pyarrow"),
}


def cpu_s(work: Callable[[], object], repeat: int) -> float:
    """Return the least CPU seconds of ``repeat`` runs."""
    best = float("inf")
    for _ in range(repeat):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def options_for(name: str) -> ReadOptions:
    """Return the options that a format needs."""
    known = aliases.load()
    if name == "dmon":
        begin = datetime.fromtimestamp(BEGIN, UTC)
        return ReadOptions(aliases=known, zone=UTC, node="node0000", start=begin, interval_s=STEP_S)
    return ReadOptions(aliases=known, zone=UTC, node="node0000" if name == "nvidia-smi" else None)


def measure(name: str, scrapes: int, repeat: int, directory: Path) -> None:
    """Measure the reader of a format and its ingest, print the figures and report the ratio."""
    format_, path, options = FORMATS[name], directory / "input", options_for(name)
    format_.write(path, scrapes)

    def read() -> int:
        _, frames = inputs.read_file(path, options, ReadingNotes(path.name), name if name == "dmon" else None)
        return sum(len(frame) for frame in frames)

    samples = read()
    assert samples == scrapes * GPUS, f"{name}: {samples} samples"
    read_s, share = cpu_s(read, repeat), 1.0
    if format_.peer_scrapes is None:
        peer = cpu_s(lambda: format_.peer(path), repeat)
    else:
        share = scrapes / format_.peer_scrapes
        format_.write(directory / "part", format_.peer_scrapes)
        peer = share * cpu_s(lambda: format_.peer(directory / "part"), repeat)
    numbers = itertools.count()

    def store() -> None:
        summary = ingest_files(SampleStore(directory / f"history{next(numbers)}"), [path], options)
        assert summary.new == samples, f"{name}: {summary}"

    stored = cpu_s(store, repeat)
    _show(f"{name} ({format_.named})", path.stat().st_size, samples, (read_s, stored, peer))
    key = name.replace("-", "_")
    report(**{f"{key}_to_peer": read_s / peer, f"{key}_stored_to_peer": stored / peer})


def measure_files(count: int, directory: Path) -> None:
    """Measure the ingest of exposition files with one scrape of a node each."""
    (directory / "files").mkdir()
    for at in range(count):
        exposition(directory / "files" / f"scrape{at:05d}.prom", 1, PER_NODE, at)
    options = options_for("exposition")
    begin = time.process_time()
    summary = ingest_files(SampleStore(directory / "history"), [directory / "files"], options)
    stored = time.process_time() - begin
    assert summary.new == count * PER_NODE, summary
    part = sorted((directory / "files").iterdir())[:200]
    texts = [path.read_text() for path in part]
    peer = cpu_s(lambda: [_exposition_peer(text) for text in texts], 2) * count / len(part)
    size = sum(path.stat().st_size for path in (directory / "files").iterdir())
    _show("files (prometheus_client)", size, summary.new, (None, stored, peer))
    print(f"{'':32} {stored / count * 1e3:.2f} ms per file, {count:,} files")
    report(files_stored_to_peer=stored / peer)


def _show(name: str, size: int, samples: int, seconds: tuple[float | None, float, float]) -> None:
    """Print a line for the CPU seconds of reading, ingesting and the peer."""
    read_s, stored, peer = seconds
    read = f"{'':19} " if read_s is None else f"{samples / read_s:>10,.0f} {size / 1e6 / read_s:>8,.0f} "
    ratio = stored / peer if read_s is None else read_s / peer
    print(
        f"{name:32} {samples:>10,} {read}{samples / stored:>10,.0f} {samples / peer:>10,.0f}"
        f" {size / 1e6 / peer:>8,.0f} {ratio:>8.2f}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scrapes", type=int, nargs="?", default=240)
    parser.add_argument("--files", type=int, default=2000, help="number of files with one scrape")
    parser.add_argument("--formats", default=",".join([*FORMATS, "files"]), help="names, joined by commas")
    parser.add_argument("--repeat", type=int, default=3, help="number of runs, of which the fastest counts")
    options = parser.parse_args()
    print(
        f"{'per CPU second':16} {'samples':>10} {'read':>10} {'MB':>8} {'ingested':>10} {'peer':>10} {'MB':>8}   ratio"
    )
    for name in options.formats.split(","):
        with tempfile.TemporaryDirectory() as directory:
            if name == "files":
                measure_files(options.files, Path(directory))
            else:
                measure(name, options.scrapes, options.repeat, Path(directory))
    print(f"peak memory {peak_gib():.2f} GiB")


if __name__ == "__main__":
    main()
