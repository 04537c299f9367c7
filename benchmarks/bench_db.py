"""The database at scale: ``python benchmarks/bench_db.py [--runs 1000000] [--days 1000] [--url URL]``.

Fills an empty database (SQLite in a temporary directory, or the one at ``--url``) with synthetic accounting: this many
job runs over so many days, each with a step and a recorded GPU, loaded in bulk (``COPY``, ``LOAD DATA``). Then it times
what a night and a look-up do: ingest of a day, its repetition, each query of a report over the last day, the report
itself, the retention of three days, and the migrations 0006 to the newest, which are undone before. The ratio compares
reading the runs of a day with the bare driver reading the same rows. ``--only`` names the parts to run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
from ratios import peak_gib, report
from sqlalchemy import create_engine, make_url, text

from slurm_affinode.db import migrations, tables
from slurm_affinode.db.accounting import to_stored, write_rows
from slurm_affinode.db.engine import parse_url
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS, STEPS, conform

END = datetime(2026, 11, 2, tzinfo=UTC)
"""The end of the last day."""
AT_ONCE = 250_000
FACTS = {
    "jobs": (tables.jobs, JOBS),
    "steps": (tables.steps, STEPS),
    "allocation_gpus": (tables.allocation_gpus, ALLOCATION_GPUS),
}


def facts(first: int, count: int, begin: datetime, every_s: float) -> dict[str, pl.DataFrame]:
    """Return runs ``first``, ``first + 1``, ...: submitted at equal intervals, most of them for minutes or hours."""
    number = pl.int_range(first, first + count, eager=True).alias("number")
    begin_s = int(begin.timestamp())
    runs = (
        pl.DataFrame(number)
        .with_columns(
            submit=begin_s + (pl.col("number") * every_s).cast(pl.Int64),
            elapsed_s=60 + pl.col("number") * 7919 % 30_000,
            gpus=pl.when(pl.col("number") % 2 == 0).then(1 + pl.col("number") % 8).otherwise(0),
        )
        .with_columns(start=pl.col("submit") + 120)
        .with_columns(end=pl.col("start") + pl.col("elapsed_s"))
    )

    def moment(name: str) -> pl.Expr:
        return pl.from_epoch(pl.col(name), time_unit="s").dt.replace_time_zone("UTC").cast(pl.Datetime("ms", "UTC"))

    key = [pl.lit("bench").alias("cluster"), (1000 + pl.col("number")).alias("job_id")]
    times = [moment(name).alias(name) for name in ("start", "end")]
    jobs = runs.select(
        *key, moment("submit").alias("submit"), moment("submit").alias("eligible"), *times, "elapsed_s", "gpus",
        pl.format("train-{}", pl.col("number") % 977).alias("job_name"),
        pl.format("user{}", pl.col("number") % 3500).alias("user"), (10_000 + pl.col("number") % 3500).alias("uid"),
        pl.format("group{}", pl.col("number") % 410).alias("account"),
        pl.format("part{}", pl.col("number") % 5).alias("partition"), pl.lit("normal").alias("qos"),
        pl.when(pl.col("number") % 10 == 3).then(pl.lit("FAILED")).otherwise(pl.lit("COMPLETED")).alias("state"),
        pl.lit(0).alias("exit_code"), pl.lit(43_200).alias("timelimit_s"), pl.lit(1).alias("nodes"),
        pl.format("gpu{}", pl.col("number") % 2000).alias("node_list"), pl.lit(16).alias("cpus"),
        pl.format("billing=16,cpu=16,gres/gpu={},mem=120G,node=1", "gpus").alias("alloc_tres"),
        pl.format("/home/user{}/project", pl.col("number") % 3500).alias("work_dir"),
        pl.format("sbatch --gpus=1 train.sh --seed={}", "number").alias("submit_line"),
        pl.when(pl.col("number") % 100 < 50).then(1000 + pl.col("number") // 100 * 100).alias("array_job_id"),
    )  # fmt: skip
    steps = runs.select(
        *key, moment("submit").alias("submit"), pl.lit("batch").alias("step_id"), *times, "elapsed_s",
        pl.lit("COMPLETED").alias("state"), pl.lit(1).alias("nodes"),
        (2**30 + pl.col("number") % 2**33).alias("max_rss_bytes"),
    )  # fmt: skip
    gpus = runs.filter(pl.col("gpus") > 0).select(
        *key, times[0], pl.format("gpu{}", pl.col("number") % 2000).alias("node"),
        pl.format("GPU-{}", pl.col("number") % 16_000).alias("gpu"),
    )  # fmt: skip
    frames = {"jobs": jobs, "steps": steps, "allocation_gpus": gpus}
    return {
        name: conform(
            frame.select(pl.col(column).cast(FACTS[name][1][column]) for column in frame.columns), FACTS[name][1]
        )
        for name, frame in frames.items()
    }


def load(store: Repository, runs: int, begin: datetime, every_s: float) -> None:
    """Write the facts without looking for earlier ones."""
    dialect = store.engine.dialect.name
    engine = store.engine
    if dialect in ("mysql", "mariadb"):
        engine = create_engine(store.engine.url, connect_args={"local_infile": True})
    for first in range(0, runs, AT_ONCE):
        frames = facts(first, min(AT_ONCE, runs - first), begin, every_s)
        with engine.begin() as connection:
            for name, frame in frames.items():
                table, schema = FACTS[name]
                key = [column.name for column in table.primary_key]
                stored = to_stored(frame, schema, key).with_columns(revision=pl.lit(1, pl.Int64))
                if dialect == "sqlite":
                    write_rows(connection, table, stored)
                else:
                    _bulk(connection.connection.driver_connection, name, stored, dialect)


def _bulk(driver: object, name: str, stored: pl.DataFrame, dialect: str) -> None:
    quote = '"' if dialect == "postgresql" else "`"
    columns = ", ".join(f"{quote}{column}{quote}" for column in stored.columns)
    if dialect == "postgresql":
        buffer = io.BytesIO()
        stored.write_csv(buffer, include_header=False)
        with driver.cursor() as cursor, cursor.copy(f"COPY {name} ({columns}) FROM STDIN (FORMAT csv)") as copy:  # type: ignore[attr-defined]
            copy.write(buffer.getbuffer())
        return
    with tempfile.NamedTemporaryFile(suffix=".tsv") as file:
        stored.write_csv(file.name, include_header=False, separator="\t", null_value="\\N", quote_style="never")
        with driver.cursor() as cursor:  # type: ignore[attr-defined]
            cursor.execute(f"LOAD DATA LOCAL INFILE '{file.name}' INTO TABLE {name} CHARACTER SET utf8mb4 ({columns})")


def analyze(store: Repository) -> None:
    """Bring the statistics of a server up to date, as its own jobs do; nothing does that for SQLite."""
    dialect = store.engine.dialect.name
    if dialect == "sqlite":
        return
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        verb = "VACUUM ANALYZE" if dialect == "postgresql" else "ANALYZE TABLE"
        connection.execute(text(f"{verb} {', '.join(FACTS)}"))


def undo_migrations(store: Repository) -> None:
    """Undo the migrations from 0006 on: its column and all indexes of later ones."""
    dialect = store.engine.dialect.name
    with store.engine.begin() as connection:
        for name, table in _INDEXES.items():
            of_table = f" ON {table}" if dialect in ("mysql", "mariadb") else ""
            connection.execute(text(f"DROP INDEX IF EXISTS {name}{of_table}"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN priority"))
        connection.execute(text("DELETE FROM schema_migrations WHERE version >= 6"))


_INDEXES = {"jobs_array": "jobs", "jobs_het": "jobs", "jobs_revision": "jobs", "steps_revision": "steps",
            "suspensions_revision": "suspensions", "steps_end": "steps", "allocation_gpus_start": "allocation_gpus",
            "ingests_finished": "ingests", "ingests_kind": "ingests", "ingests_bad": "ingests",
            "jobs_start": "jobs"}  # fmt: skip


def _quoted(store: Repository, name: str) -> str:
    return store.engine.dialect.identifier_preparer.quote_identifier(name)


def bare(store: Repository, since: datetime, until: datetime) -> int:
    """Read the runs of a day with the driver alone; return their number."""
    mark = "?" if store.engine.dialect.name == "sqlite" else "%s"
    names = ", ".join(_quoted(store, name) for name in JOBS)
    end, start = _quoted(store, "end"), _quoted(store, "start")
    query = f"SELECT {names} FROM jobs WHERE ({end} IS NULL OR {end} >= {mark}) AND {start} < {mark}"
    with store.engine.connect() as connection:
        driver = connection.connection.cursor()
        driver.execute(query, (int(since.timestamp()), int(until.timestamp())))
        return len(driver.fetchall())


def timed(what: str, work: Callable[[], object]) -> float:
    """Do ``work``; print and return its seconds, with its result if that is a number."""
    begin = time.perf_counter()
    outcome = work()
    took = time.perf_counter() - begin
    rows = len(outcome) if isinstance(outcome, pl.DataFrame) else outcome
    print(f"{what:34} {took:9.3f} s  {f'{rows:,} rows' if isinstance(rows, int) else ''}".rstrip(), flush=True)
    return took


@contextlib.contextmanager
def opened(url: str | None) -> Iterator[str]:
    """Yield the URL of the database; without one, that of a temporary SQLite file."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="affinode-bench-") as directory:
        yield f"sqlite:///{directory}/affinode.sqlite"


PARTS = ("load", "queries", "ingest", "commands", "retention", "migrations")


def measure(url: str, runs: int, days: int, parts: tuple[str, ...]) -> None:
    """Fill the database, and print what each part takes."""
    begin, every_s = END - timedelta(days=days), days * 86_400 / runs
    since, old = END - timedelta(days=1), begin + timedelta(days=3)
    with Repository.open(url) as store:
        if "load" in parts:
            timed(f"load {runs:,} runs", lambda: load(store, runs, begin, every_s))
            timed("statistics", lambda: analyze(store))
            print(f"{'size':34} {store.counts().size_bytes / 2**30:9.2f} GiB")
        if "queries" in parts:
            reading = timed("bare driver, runs of a day", lambda: bare(store, since, END))
            day = timed("runs of a day", lambda: store.jobs(since, END))
            for name, call in {
                "runs of an hour long ago": lambda: store.jobs(old, old + timedelta(hours=1)),
                "GPU runs of a day": lambda: store.jobs(since, END, gpu_only=True),
                "pending at the end": lambda: store.pending(END, since=since),
                "recorded GPUs of a day": lambda: store.allocation_gpus(since, END),
                "fingerprint of a day": lambda: store.fingerprint(since, END),
                "newest times": store.newest_times,
                "one job": lambda: store.find_job(1000 + runs // 2),
                "steps of a job": lambda: store.steps_of([1000 + runs // 2]),
                "totals (db status)": store.counts,
            }.items():
                timed(name, call)
            report(day_to_driver=day / reading)
        if "ingest" in parts:
            of_day = facts(runs, max(1, runs // days), begin, every_s)
            timed(f"ingest of a day ({len(of_day['jobs']):,} runs)", lambda: _counts(store, of_day))
            timed("the same again", lambda: _counts(store, of_day))
    if "commands" in parts:
        with tempfile.TemporaryDirectory(prefix="affinode-bench-") as directory:
            out = Path(directory) / "out"
            interval = ("--since", since.isoformat(), "--until", END.isoformat(), "--out", str(out))
            timed("report of a day", lambda: _command(url, directory, "report", *interval))
            timed("job", lambda: _command(url, directory, "job", str(1000 + runs // 2)))
            config, now = str(_config(Path(directory))), (END + timedelta(hours=4)).isoformat()
            nightly = ("nightly", "--config", config, "--now", now)
            timed("nightly: a day, week and month", lambda: _command(url, directory, *nightly))
            timed("nightly again, nothing is new", lambda: _command(url, directory, *nightly))
    with Repository.open(url) as store:
        if "retention" in parts:
            timed("retention of the oldest three days", lambda: store.delete_before(old))
            timed("retention, nothing to delete", lambda: store.delete_before(old))
        if "migrations" in parts:
            undo_migrations(store)
            timed("migrations 0006 and later", lambda: len(migrations.upgrade(store.engine)))
    print(f"peak memory {peak_gib():.2f} GiB")


def _counts(store: Repository, frames: dict[str, pl.DataFrame]) -> int:
    """Ingest the frames; return the number of new rows."""
    done = store.upsert(frames["jobs"], frames["steps"])
    return done.jobs.new + done.steps.new + store.upsert_allocation_gpus(frames["allocation_gpus"]).new


_MAIN = "from slurm_affinode.cli.entry import main; main()"


def _command(url: str, directory: str, *arguments: str) -> None:
    """Run a command of the program."""
    environment = {**os.environ, "SLURM_AFFINODE_DB": url}
    command = [sys.executable, "-c", _MAIN, *arguments, "--state", directory]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def _config(directory: Path) -> Path:
    """Write a configuration: accounting comes from a file without jobs, and no runs are old."""
    accounting = directory / "accounting.txt"
    accounting.write_text("JobIDRaw|State|Submit|Start|End|AllocTRES|JobName\n", encoding="utf-8")
    path = directory / "config.toml"
    lines = ("[cluster]", 'timezone = "UTC"', "[nightly]", f'out = "{directory}/reports"', 'keep_jobs = "3650d"',
             f'accounting_paths = ["{accounting}"]')  # fmt: skip
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--days", type=int, default=1000)
    parser.add_argument("--url", help="an empty database, or a filled one with --only [default: SQLite]")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas")
    arguments = parser.parse_args()
    with opened(arguments.url) as url:
        print(f"synthetic accounting on {make_url(parse_url(url)).get_backend_name()}")
        measure(url, arguments.runs, arguments.days, tuple(arguments.only.split(",")))


if __name__ == "__main__":
    main()
