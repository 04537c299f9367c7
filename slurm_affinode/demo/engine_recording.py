"""The recorded metrics of a real engine, as those of a server in a job of the recorded history."""

from __future__ import annotations

import tomllib
from pathlib import Path

import polars as pl

from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.serving.reader import read_file
from slurm_affinode.metrics.serving.schema import SAMPLES

PORT = 8000


def write(recording: Path, cluster: str, target: Path) -> str:
    """Write the samples of the engine in ``recording`` to the Parquet file ``target``; return a note on their origin.

    They get the job, the user and the GPUs of the job named in ``engine.toml``, and its time. ``target`` is in a format
    that ``ingest serving`` reads.
    """
    facts = tomllib.loads((recording / "engine.toml").read_text("utf-8"))
    source = recording / "engine.prom.gz"
    options = ReadOptions(aliases=aliases.load(), default_cluster=cluster, node=facts["node"])
    _, frames = read_file(source, options, ReadingNotes(source.name), address=f"{facts['node']}:{PORT}")
    samples = pl.concat(frames)
    later = facts["begins"] - samples["time"].min()
    job = str(facts["job"])
    moved = samples.with_columns(
        pl.col("time") + later,
        pl.col("start_time") + later.total_seconds(),
        job=pl.lit(job),
        user=pl.lit(facts["user"]),
        gpus=pl.lit(_gpus(recording, job)),
    )
    moved.select(pl.col(name).cast(dtype) for name, dtype in SAMPLES.items()).write_parquet(target)
    return (
        f"The metrics of this engine are a recording of {facts['engine']}, made on a CPU with a tiny model on "
        f"{facts['recorded']:%Y-%m-%d} and moved in time. It did not run in job {job}: the job, its user and its "
        "emulated GPU belong to the recorded cluster, so GPU utilization and memory do not follow the engine's load."
    )


def _gpus(recording: Path, job: str) -> str:
    """Return the UUIDs of the job's GPUs, joined by commas."""
    samples = pl.concat([pl.read_parquet(path) for path in sorted(recording.glob("gpu-*.parquet"))])
    return ",".join(sorted(samples.filter(pl.col("job") == job)["uuid"].unique()))
