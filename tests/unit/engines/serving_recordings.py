"""The recordings of serving engines as frames of samples, and what the client did."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl

from slurm_affinode.engines.reader import read_file
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions

OPTIONS = ReadOptions(aliases=aliases.load(), default_cluster="lab", node="gpu01")


def read(directory: Path, name: str) -> pl.DataFrame:
    """Return the samples of a recording, as those of an engine in a job."""
    path = directory / f"{name}.prom.gz"
    _, frames = read_file(path, OPTIONS, ReadingNotes(path.name), address="gpu01:8000")
    return conform(pl.concat(frames).with_columns(job=pl.lit("77"), user=pl.lit("ada")))


def conform(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with exactly the columns of a sample."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SAMPLES.items()
    )


def phases(directory: Path, name: str) -> list[tuple[int, int, float]]:
    """Return the phases of the client: begin and end in ms since the epoch, and requests/s."""
    rows = [
        json.loads(line)
        for line in gzip.decompress((directory / f"{name}.requests.jsonl.gz").read_bytes()).decode().splitlines()
    ]
    begun = [row for row in rows if "phase_begins" in row]
    return [(row["at_ms"], row["at_ms"] + int(row["seconds"] * 1000), row["rate"]) for row in begun]
