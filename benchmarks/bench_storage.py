"""Stores of samples compared: ``python benchmarks/bench_storage.py [--samples 5000000] [--stores ours,delta,...]``.

Each store gets the samples of ``bench_join.py``, a day at a time and sorted, and prints

``bytes``     bytes of a sample on disk,
``append``    seconds to append all days (``ours``: to ingest them with checks, and to compact them),
``again``     seconds for 1,000 samples that it has already (``ours``: by the fingerprint of their file; the others:
              merge by device and time),
``scan``      seconds for Polars to read the columns of the join and to sum each,
``writers``   rows of two processes that append eight times each at the same time: kept, and refused commits,
``MB``        installed size of the library and of what it needs beyond pyarrow.

Needs ``uv run --with deltalake --with 'pyiceberg[sql-sqlite]' --with duckdb``; a store whose library is missing is left
out. DuckLake loads an extension of DuckDB from the network, or from ``$DUCKLAKE_EXTENSION``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
from bench_join import COLUMNS, START, Plan, day_of, identities

from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES

ROUNDS = 8
AGAIN_ROWS = 1000


class ProductStore:
    """The sample store."""

    packages: tuple[str, ...] = ()

    def __init__(self, root: Path) -> None:
        self._root = root
        self._table: pl.DataFrame | None = None

    def append(self, day: pl.DataFrame, name: str) -> None:
        """Ingest samples, and compact their day."""
        if self._table is None:
            self._table = identities(day["device"].n_unique())
        named = day.join(self._table, on="device").select(
            (pl.col(n) if n in {*day.columns, *self._table.columns} else pl.lit(None)).cast(t).alias(n)
            for n, t in SAMPLES.items()
        )
        store = SampleStore(self._root)
        store.ingest(named, source=name, fingerprint=name)
        store.close()

    def again(self, day: pl.DataFrame, name: str) -> None:
        """Skip a file that was ingested."""
        if name not in SampleStore(self._root).sources():
            self.append(day, name)

    def rows(self) -> pl.LazyFrame:
        """Return all samples."""
        return pl.scan_parquet([part.path for part in SampleStore(self._root).parts()])


class Delta:
    """Delta Lake, by delta-rs."""

    packages = ("deltalake",)

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def append(self, day: pl.DataFrame, name: str) -> None:
        """Append a day."""
        from deltalake import write_deltalake  # noqa: PLC0415 - may be missing

        write_deltalake(self._root, with_day(day).to_arrow(), mode="append", partition_by=["day"])

    def again(self, day: pl.DataFrame, name: str) -> None:
        """Merge a day."""
        from deltalake import DeltaTable  # noqa: PLC0415 - may be missing

        same = "t.day = s.day and t.device = s.device and t.time = s.time"
        merge = DeltaTable(self._root).merge(with_day(day).to_arrow(), same, source_alias="s", target_alias="t")
        merge.when_not_matched_insert_all().execute()

    def rows(self) -> pl.LazyFrame:
        """Return all samples."""
        return pl.scan_delta(self._root)


class Iceberg:
    """Iceberg, by PyIceberg with a catalog in SQLite."""

    packages = ("pyiceberg", "sqlalchemy")

    def __init__(self, root: Path) -> None:
        self._root = root

    def _open(self, day: pl.DataFrame | None = None) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415 - may be missing

        self._root.mkdir(exist_ok=True)
        catalog = SqlCatalog(
            "bench", uri=f"sqlite:///{self._root}/catalog.db?timeout=60", warehouse=f"file://{self._root}"
        )
        if day is not None and not catalog.namespace_exists("gpu"):
            catalog.create_namespace("gpu")
            catalog.create_table("gpu.samples", with_day(day).to_arrow().schema)
        return catalog.load_table("gpu.samples")

    def append(self, day: pl.DataFrame, name: str) -> None:
        """Append a day."""
        rows = with_day(day)
        self._open(rows).append(rows.to_arrow())

    def again(self, day: pl.DataFrame, name: str) -> None:
        """Merge a day."""
        rows = with_day(day)
        self._open(rows).upsert(rows.to_arrow(), join_cols=["device", "time"])

    def rows(self) -> pl.LazyFrame:
        """Return all samples."""
        return pl.scan_iceberg(self._open())


class DuckLake:
    """DuckLake, with a catalog in a file of DuckDB."""

    packages = ("duckdb",)

    def __init__(self, root: Path) -> None:
        self._root = root

    def _open(self) -> Any:
        import duckdb  # noqa: PLC0415 - may be missing

        self._root.mkdir(exist_ok=True)
        connection = duckdb.connect()
        connection.execute(f"LOAD '{path}'" if (path := os.environ.get("DUCKLAKE_EXTENSION")) else "INSTALL ducklake")
        connection.execute(f"ATTACH 'ducklake:{self._root}/catalog.db' AS lake (DATA_PATH '{self._root}/data')")
        return connection

    def append(self, day: pl.DataFrame, name: str) -> None:
        """Append a day."""
        rows = with_day(day).to_arrow()
        with self._open() as connection:
            connection.register("day_rows", rows)
            connection.execute("CREATE TABLE IF NOT EXISTS lake.samples AS FROM day_rows LIMIT 0")
            connection.execute("INSERT INTO lake.samples FROM day_rows")

    def again(self, day: pl.DataFrame, name: str) -> None:
        """Merge a day."""
        with self._open() as connection:
            connection.register("day_rows", with_day(day).to_arrow())
            connection.execute(
                "MERGE INTO lake.samples t USING day_rows s ON t.device = s.device AND t.time = s.time "
                "WHEN NOT MATCHED THEN INSERT"
            )

    def rows(self) -> pl.LazyFrame:
        """Return all samples."""
        return pl.scan_parquet(str(self._root / "data/**/*.parquet"))


STORES = {"ours": ProductStore, "delta": Delta, "iceberg": Iceberg, "ducklake": DuckLake}


def with_day(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with signed device numbers, which all formats know, and their day."""
    return rows.with_columns(
        pl.col("device").reinterpret(signed=True), pl.col("time").dt.cast_time_unit("us"),
        pl.col("time").dt.strftime("%Y-%m-%d").alias("day"),
    )  # fmt: skip


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of ``work``."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def write_rounds(store: str, root: Path, writer: int) -> tuple[int, list[str]]:
    """Append some rows several times; return the rows of the commits that succeeded, and the errors of the others."""
    rows, errors = 0, []
    for number in range(ROUNDS):
        some = row_at(START + timedelta(days=number, seconds=writer))
        try:
            STORES[store](root).append(some, f"{writer}-{number}")
            rows += 1
        except Exception as error:
            errors.append(type(error).__name__)
    return rows, errors


def two_writers(store: str, root: Path) -> tuple[int, int, list[str]]:
    """Return the rows that two processes committed, those in the store, and the errors."""
    STORES[store](root).append(row_at(START - timedelta(days=99)), "first")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.starmap(write_rounds, [(store, root, writer) for writer in (1, 2)])
    kept = STORES[store](root).rows().select(pl.len()).collect().item() - 1
    return sum(rows for rows, _ in results), kept, [name for _, errors in results for name in errors]


def row_at(moment: datetime) -> pl.DataFrame:
    """Return a sample of one GPU."""
    return pl.DataFrame(
        {"device": identities(1)["device"], "time": [moment], **{name: [1.0] for name in COLUMNS[1:]}},
        schema_overrides={"device": pl.UInt64, "time": pl.Datetime("ms", "UTC")},
    )


def installed_mb(packages: Sequence[str]) -> float:
    """Return the installed size of packages and of what they require, without pyarrow and what ours requires."""
    seen = {"pyarrow", "numpy", "pandas", "polars", "rich", "click", "httpx"}
    todo, size = [*packages], 0
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
        size += sum(path.stat().st_size for path in paths if path.is_file())
        todo += [
            re.split(r"[^\w.-]", requirement)[0]
            for requirement in distribution.requires or ()
            if "extra ==" not in requirement
        ]
    return size / 1e6


def measure(store: str, root: Path, days: Sequence[pl.DataFrame]) -> None:
    """Print the row of a store."""
    made = STORES[store](root / "store")

    def append_all() -> None:
        for number, day in enumerate(days):
            made.append(day, f"day-{number}")

    append = timed(append_all)
    disk = sum(path.stat().st_size for path in (root / "store").rglob("*") if path.is_file())
    rows = sum(len(day) for day in days)
    columns = [pl.col(name).sum() for name in COLUMNS if name != "time"]
    scan = min(timed(lambda: made.rows().select(pl.col("time").max(), *columns).collect()) for _ in range(3))
    again = timed(lambda: made.again(days[0].head(AGAIN_ROWS), "day-0"))
    stored = made.rows().select(pl.len()).collect().item()
    committed, kept, errors = two_writers(store, root / "two")
    print(f"{store:<9} {disk / rows:6.1f} {append:8.1f} {again:8.1f} {scan:8.2f}   {committed} committed, {kept} kept, "
          f"{len(errors)} refused {sorted(set(errors))}   {installed_mb(made.packages):6.0f}"
          + ("" if stored == rows else f"   {stored - rows:+,} rows"))  # fmt: skip


def main() -> int:
    """Measure each store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5_000_000)
    parser.add_argument("--stores", default=",".join(STORES))
    options = parser.parse_args()
    plan = Plan.of(options.samples, 0)
    table = identities(plan.devices)
    days = [pl.concat(day_of(plan, day, table)) for day in range(plan.days)]
    print(f"{sum(map(len, days)):,} samples of {plan.devices:,} GPUs in {plan.days} days")
    print(f"{'store':<9} {'bytes':>6} {'append s':>8} {'again s':>8} {'scan s':>8}   writers   MB")
    for name in options.stores.split(","):
        if any(importlib.util.find_spec(package) is None for package in STORES[name].packages):
            print(f"{name:<9} its library is not installed")
            continue
        root = Path(tempfile.mkdtemp(prefix="bench-storage-"))
        try:
            measure(name, root, days)
        except Exception as error:
            print(f"{name:<9} {type(error).__name__}: {error}"[:300])
        finally:
            shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
