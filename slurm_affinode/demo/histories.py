"""The demo's histories, and the report on one of them: write files, ingest, render."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import ClusterConfig, Config, StoreConfig
from slurm_affinode.base.errors import AffinodeError, unwritable
from slurm_affinode.base.files import replacing, write_text
from slurm_affinode.db.repository import Repository
from slurm_affinode.demo.synthetic import NODES, node_history, sacct_lines, schedule
from slurm_affinode.engines.reader import read_file
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.pipeline import ingest, report, stored_accounting, whatif, whatif_page
from slurm_affinode.report.context import ReplayNote
from slurm_affinode.report.output import WrittenReport
from slurm_affinode.slurm.accounting import sacct
from slurm_affinode.slurm.accounting.sacct import SacctReading

RECORDING = Path(__file__).resolve().parent / "recording"
SYNTHETIC_START = datetime(2026, 11, 2, tzinfo=UTC)
"""A Monday; fixed, so that the same seed gives the same report on every day."""
JOBS_PER_DAY = 34.0


@dataclass(frozen=True, slots=True)
class DemoHistory:
    """A history and its labels."""

    title: str
    about: str
    """One or two sentences for a terminal: what this is, and that it is not a site's data."""
    cluster: str
    since: datetime
    until: datetime
    write_input: Callable[[Path], None]
    """Writes ``sacct.txt`` (format of ``sacct --parsable2``, UTC), ``gpu/`` and, if there are engine metrics,
    ``serving/`` into a directory."""
    earlier: int = 0
    """Periods of the same length before ``since``, for the trend."""
    engine_origin: str = ""
    """Origin of the engine metrics; empty without them."""
    suspend_idle_s: float | None = None
    """Idle time of the suspension that ``replay_demo`` replays; ``None``: the history is too short for one."""


def recorded() -> DemoHistory:
    """Return the recording: real jobs under a real Slurm with emulated GPUs, and the metrics of a real engine."""
    facts, engine = _facts("recording.toml"), _facts("engine.toml")
    since, until = facts["since"], facts["until"]
    minutes = round((until - since).total_seconds() / 60)
    cluster = "affinode"

    def write_input(target: Path) -> None:
        (target / "gpu").mkdir(parents=True, exist_ok=True)
        for path in sorted(RECORDING.glob("*.parquet")):
            shutil.copyfile(path, target / "gpu" / path.name)
        shutil.copyfile(RECORDING / "sacct.txt", target / "sacct.txt")
        (target / "serving").mkdir(exist_ok=True)
        _engine_samples(engine, cluster).write_parquet(target / "serving" / "engine.parquet")

    return DemoHistory(
        title=f"Demo: {minutes} minutes recorded from a Slurm cluster with emulated GPUs",
        about=f"{minutes} minutes of a cluster in containers: real jobs under Slurm {facts['slurm']}, recorded as they "
        "ran. Its GPUs are emulated. The metrics of a model server in it were recorded from a real engine on a CPU.",
        cluster=cluster,
        since=since,
        until=until,
        write_input=write_input,
        engine_origin=f"The metrics of this engine are a recording of {engine['engine']}, made on a CPU with a tiny "
        f"model on {engine['recorded']:%Y-%m-%d} and moved in time. It did not run in job {engine['job']}: the job, "
        "its user and its emulated GPU belong to the recorded cluster, so GPU utilization and memory do not follow "
        "the engine's load.",
    )


def _facts(name: str) -> dict[str, Any]:
    return tomllib.loads((RECORDING / name).read_text("utf-8"))


_PORT = 8000


def _engine_samples(facts: Mapping[str, Any], cluster: str) -> pl.DataFrame:
    """Return the samples of the recorded engine with the time, the job, the user and the GPUs of ``engine.toml``.

    Columns: ``SAMPLES``, which ``ingest serving`` reads.
    """
    source = RECORDING / "engine.prom.gz"
    options = ReadOptions(aliases=aliases.load(), default_cluster=cluster, node=facts["node"])
    _, frames = read_file(source, options, ReadingNotes(source.name), address=f"{facts['node']}:{_PORT}")
    samples = pl.concat(frames)
    later = facts["begins"] - samples["time"].min()
    job = str(facts["job"])
    moved = samples.with_columns(
        pl.col("time") + later,
        pl.col("start_time") + later.total_seconds(),
        job=pl.lit(job),
        user=pl.lit(facts["user"]),
        gpus=pl.lit(_gpus(job)),
    )
    return moved.select(pl.col(name).cast(dtype) for name, dtype in SAMPLES.items())


def _gpus(job: str) -> str:
    """Return the UUIDs of the job's GPUs, joined by commas."""
    samples = pl.concat([pl.read_parquet(path) for path in sorted(RECORDING.glob("gpu-*.parquet"))])
    return ",".join(sorted(samples.filter(pl.col("job") == job)["uuid"].unique()))


def synthetic(*, days: float, seed: int, earlier: int = 0) -> DemoHistory:
    """Return a synthetic history of 32 GPUs on six nodes, reproducible by its seed.

    ``earlier``: periods of as many ``days`` that precede the reported one.
    """
    start, whole = SYNTHETIC_START - timedelta(days=earlier * days), days * (1 + earlier)

    def write_input(target: Path) -> None:
        runs = schedule(np.random.default_rng(seed), days=whole, jobs_per_day=JOBS_PER_DAY)
        lines = sacct_lines(runs, start=start, horizon_s=int(whole * 86400))
        (target / "gpu").mkdir(parents=True, exist_ok=True)
        write_text(target / "sacct.txt", "\n".join(lines) + "\n")
        for node in NODES:
            with replacing(target / "gpu" / f"{node.name}.parquet") as path:
                samples = node_history(node, runs, start=start, days=whole, seed=seed, shown=days)
                samples.write_parquet(path)

    return DemoHistory(
        title="Demo: a synthetic cluster",
        about=f"{days:g} days of an invented cluster: 32 GPUs on six nodes. The data is synthetic.",
        cluster="demo",
        since=SYNTHETIC_START,
        until=SYNTHETIC_START + timedelta(days=days),
        write_input=write_input,
        earlier=earlier,
        suspend_idle_s=900.0,
    )


REPLAY = "whatif.html"
"""The page of ``replay_demo``."""
_MARK = "made by slurm-affinode demo"

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoReplay:
    """The replay of the queue with idle jobs suspended."""

    page: Path
    note: ReplayNote


def build_demo(out: Path, history: DemoHistory, *, step: Step | None = None) -> WrittenReport:
    """Write the input, the state and the report into ``out``, without a replay; see ``ingest_demo``."""
    ingest_demo(out, history, step=step)
    return report_demo(out, history, step=step)


def ingest_demo(out: Path, history: DemoHistory, *, step: Step | None = None) -> None:
    """Write ``input/`` and ``state/`` into ``out``, replacing an earlier demo.

    Raises ``AffinodeError`` if ``out`` cannot be written or contains files that no demo made.
    """
    say = step or (lambda _: None)
    try:
        _clear(out)
        say("writing the history")
        history.write_input(out / "input")
    except OSError as error:
        raise unwritable(out, error, hint="choose another --out") from error
    config = _config(out, history)
    say("ingesting accounting")
    source = out / "input" / "sacct.txt"
    with Repository.open(config.db_url) as repository:
        accounting = sacct.read(source, where=str(source), reading=SacctReading(cluster=history.cluster, zone="UTC"))
        stored_accounting.ingest_accounting(
            repository, accounting, source=str(source), started=history.until, finished=history.until
        )
        say("ingesting GPU metrics")
        options = ingest.read_options(config)
        ingest.ingest_gpu_samples(config, repository, [out / "input" / "gpu"], options)
        if history.engine_origin:
            say("ingesting engine metrics")
            ingest.ingest_engine_samples(config, repository, options, paths=[out / "input" / "serving"])


def report_demo(
    out: Path, history: DemoHistory, replay: DemoReplay | None = None, *, step: Step | None = None
) -> WrittenReport:
    """Write ``report.html`` and ``summary.json`` of a demo in ``out``. Raises ``AffinodeError``."""
    config = _config(out, history)
    presented = report.ReportOptions(
        title=history.title, csv=True, engine_origin=history.engine_origin, computed_periods=history.earlier,
        replay=None if replay is None else replay.note,
    )  # fmt: skip
    return report.build_report(config, _query(config, history), out, options=presented, now=history.until, step=step)


def replay_demo(out: Path, history: DemoHistory, *, step: Step | None = None) -> DemoReplay | None:
    """Replay the queue of a demo in ``out`` with its idle jobs suspended, and write ``whatif.html``.

    ``None``: the history is too short. Raises ``AffinodeError``.
    """
    if history.suspend_idle_s is None:
        return None
    config = _config(out, history)
    change = whatif.Change(suspend_idle_s=history.suspend_idle_s)
    replays = whatif.replay_site(
        config, _query(config, history), change, now=history.until, step=step or (lambda _: None)
    )
    (replay,) = replays
    path = out / REPLAY
    write_text(path, whatif_page.html(replays, change, history.since, history.until, UTC))
    answer = whatif_page.answer(replay, change, history.since, history.until)
    return DemoReplay(path, ReplayNote(answer, whatif_page.assumption(replay), REPLAY))


def _config(out: Path, history: DemoHistory) -> Config:
    return Config(StoreConfig(state_dir=out / "state", db=f"sqlite:///{out / 'state' / 'affinode.sqlite'}"),
                  ClusterConfig(name=history.cluster, timezone="UTC"))  # fmt: skip


def _query(config: Config, history: DemoHistory) -> WasteQuery:
    return WasteQuery(
        history.since, history.until, thresholds=report.thresholds(config), working=report.working_time(config)
    )


def _clear(out: Path) -> None:
    """Remove ``input/``, ``state/`` and the replay of an earlier demo; refuse to touch others with these names."""
    mark = out / "state" / "demo.txt"
    if mark.exists():
        (out / REPLAY).unlink(missing_ok=True)
    elif any((out / name).exists() for name in ("input", "state")):
        raise AffinodeError(f"{out}: has input/ or state/ that no demo made", hint="choose another --out")
    for name in ("input", "state"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_text(mark, f"{_MARK}: this directory is made anew by the next one\n")
