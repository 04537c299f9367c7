"""From nothing to a report: write the synthetic history as files, take them in, render."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.config import ClusterConfig, Config, StoreConfig
from slurm_affinode.demo.accounting import sacct_lines
from slurm_affinode.demo.schedule import NODES, schedule
from slurm_affinode.demo.telemetry import node_history
from slurm_affinode.errors import AffinodeError, UnreachableError
from slurm_affinode.files import replacing, write_text
from slurm_affinode.report.build import WrittenReport
from slurm_affinode.slurm import sacct
from slurm_affinode.slurm.sacct import Reading
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import gpu_intake, intake, pipeline

START = datetime(2026, 11, 2, tzinfo=UTC)
"""A Monday; fixed, so that the same seed gives the same report on every day."""
JOBS_PER_DAY = 34.0
TITLE = "Demo: a synthetic cluster"
_MARK = "made by slurm-affinode demo"

Step = Callable[[str], None]


def build_demo(out: Path, *, days: float, seed: int, step: Step | None = None) -> WrittenReport:
    """Write ``input/``, ``state/``, ``report.html`` and ``summary.json`` into ``out``; what an earlier demo left goes.

    ``days`` is the length of the history from ``START`` on. Raises ``AffinodeError`` where ``out`` cannot be written
    or holds something that no demo made.
    """
    say = step or (lambda _: None)
    try:
        _clear(out)
        say("writing a synthetic history")
        write_input(out / "input", days=days, seed=seed)
    except OSError as error:
        raise UnreachableError(f"{out}: cannot be written: {error.strerror}", hint="choose another --out") from error
    config = Config(StoreConfig(state_dir=out / "state", db=f"sqlite:///{out / 'state' / 'affinode.sqlite'}"),
                    ClusterConfig(name="demo", timezone="UTC"))  # fmt: skip
    end = START + timedelta(days=days)
    say("taking in accounting")
    source = out / "input" / "sacct.txt"
    with Repository.open(config.db_url) as repository:
        accounting = sacct.read(source, where=str(source), how=Reading(cluster="demo", zone="UTC"))
        intake.take_in(repository, accounting, source=str(source), started=end, finished=end)
        say("taking in GPU history")
        options = gpu_intake.read_options(config)
        gpu_intake.take_in(config, repository, [out / "input" / "gpu"], options)
    query = WasteQuery(START, end, thresholds=pipeline.thresholds(config))
    return pipeline.build_report(
        config, query, out, options=pipeline.ReportOptions(title=TITLE, csv=True), now=end, step=say
    )


def write_input(directory: Path, *, days: float, seed: int) -> None:
    """Write ``sacct.txt`` (the form of ``sacct --parsable2``, UTC) and ``gpu/NODE.parquet`` (columns named by DCGM)."""
    runs = schedule(np.random.default_rng(seed), days=days, jobs_per_day=JOBS_PER_DAY)
    lines = sacct_lines(runs, start=START, horizon_s=int(days * 86400))
    (directory / "gpu").mkdir(parents=True, exist_ok=True)
    write_text(directory / "sacct.txt", "\n".join(lines) + "\n")
    for node in NODES:
        with replacing(directory / "gpu" / f"{node.name}.parquet") as path:
            node_history(node, runs, start=START, days=days, seed=seed).write_parquet(path)


def _clear(out: Path) -> None:
    """Remove ``input/`` and ``state/`` of an earlier demo; refuse to touch any other directory of these names."""
    mark = out / "state" / "demo.txt"
    if not mark.exists() and any((out / name).exists() for name in ("input", "state")):
        raise AffinodeError(f"{out}: has input/ or state/ that no demo made", hint="choose another --out")
    for name in ("input", "state"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_text(mark, f"{_MARK}: this directory is made anew by the next one\n")
