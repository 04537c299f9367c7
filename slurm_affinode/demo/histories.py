"""The histories that the demo knows."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from slurm_affinode.demo.accounting import sacct_lines
from slurm_affinode.demo.schedule import NODES, schedule
from slurm_affinode.demo.telemetry import node_history
from slurm_affinode.files import replacing, write_text

RECORDING = Path(__file__).resolve().parent / "recording"
SYNTHETIC_START = datetime(2026, 11, 2, tzinfo=UTC)
"""A Monday; fixed, so that the same seed gives the same report on every day."""
JOBS_PER_DAY = 34.0


@dataclass(frozen=True, slots=True)
class DemoHistory:
    """A history, and what it is to be called."""

    title: str
    about: str
    """One or two sentences for a terminal: what this is, and that it is not a site's."""
    cluster: str
    since: datetime
    until: datetime
    write_input: Callable[[Path], None]
    """Writes ``sacct.txt`` (the form of ``sacct --parsable2``, UTC) and ``gpu/`` into a directory."""


def recorded() -> DemoHistory:
    """The recording: real jobs, real Slurm, emulated GPUs, at the speed at which it happened."""
    facts = tomllib.loads((RECORDING / "recording.toml").read_text("utf-8"))
    since, until = facts["since"], facts["until"]
    minutes = round((until - since).total_seconds() / 60)

    def write_input(target: Path) -> None:
        (target / "gpu").mkdir(parents=True, exist_ok=True)
        for path in sorted(RECORDING.glob("*.parquet")):
            shutil.copyfile(path, target / "gpu" / path.name)
        shutil.copyfile(RECORDING / "sacct.txt", target / "sacct.txt")

    return DemoHistory(
        title=f"Demo: {minutes} minutes recorded from a Slurm cluster with emulated GPUs",
        about=f"{minutes} minutes of a cluster in containers: real jobs under Slurm {facts['slurm']}, recorded as they "
        "ran. Its GPUs are emulated.",
        cluster="affinode",
        since=since,
        until=until,
        write_input=write_input,
    )


def synthetic(*, days: float, seed: int) -> DemoHistory:
    """The invented history of 32 GPUs on six nodes; the same seed gives the same."""

    def write_input(target: Path) -> None:
        runs = schedule(np.random.default_rng(seed), days=days, jobs_per_day=JOBS_PER_DAY)
        lines = sacct_lines(runs, start=SYNTHETIC_START, horizon_s=int(days * 86400))
        (target / "gpu").mkdir(parents=True, exist_ok=True)
        write_text(target / "sacct.txt", "\n".join(lines) + "\n")
        for node in NODES:
            with replacing(target / "gpu" / f"{node.name}.parquet") as path:
                node_history(node, runs, start=SYNTHETIC_START, days=days, seed=seed).write_parquet(path)

    return DemoHistory(
        title="Demo: a synthetic cluster",
        about=f"{days:g} days of an invented cluster: 32 GPUs on six nodes. The data is synthetic.",
        cluster="demo",
        since=SYNTHETIC_START,
        until=SYNTHETIC_START + timedelta(days=days),
        write_input=write_input,
    )
