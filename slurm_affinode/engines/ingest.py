"""Ingest of engine metrics from files and scrapes into the store of engine samples."""

from __future__ import annotations

import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.http import HttpError, fetch, tls_context
from slurm_affinode.engines import reader
from slurm_affinode.engines.reader import EngineReader
from slurm_affinode.engines.samples import SampleBuilder, SeriesIdentifier, host_of
from slurm_affinode.engines.schema import IDENTITY, SAMPLES
from slurm_affinode.engines.store import ENGINES
from slurm_affinode.metrics import ingest
from slurm_affinode.metrics.ingest import Advance, FileOutcome, FileReader, IngestSummary
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.writer import AddedSource, Prepared, SampleSource
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.lines import blocks_of

SCRAPE_S = 5.0
"""Timeout of a scrape."""
LARGEST_SCRAPE = 64 * 2**20
"""Maximum size of a scrape in bytes, decompressed."""
_REMEMBERED = timedelta(days=1)
"""How long before a failed scrape an engine was seen at the address, for the failure to count as its own."""
_HINT = "vLLM, SGLang, TGI, Triton with TensorRT-LLM and llama.cpp are known; is it their /metrics?"


@dataclass(slots=True)
class EngineTotals:
    """Counts of an ingest of engine metrics, collected while samples are read."""

    failed_scrapes: int = 0
    engines: Counter[str] = field(default_factory=Counter)
    """Kind of engine -> number of engines."""
    _identities: set[tuple[str | None, ...]] = field(default_factory=set)

    def count(self, frame: pl.DataFrame, _: ReadingNotes) -> pl.DataFrame:
        """Count the samples in ``frame`` (``SAMPLES``) and return it unchanged."""
        self.failed_scrapes += int(frame["error"].is_not_null().sum())
        for identity in frame.select(*IDENTITY).unique().iter_rows():
            if identity not in self._identities:
                self._identities.add(identity)
                self.engines[str(identity[3])] += 1
        return frame


def file_reader(address: str | None, totals: EngineTotals) -> FileReader:
    """Return the reader of files with engine metrics. ``address``: see ``reader.read_file``."""

    def read(
        path: Path, options: ReadOptions, notes: ReadingNotes, format: str | None, advance: Advance
    ) -> tuple[str, Iterator[pl.DataFrame]]:
        return reader.read_file(path, options, notes, format=format, address=address, advance=advance)

    def fingerprint(path: Path, name: str, options: ReadOptions, format: str | None) -> str:
        return reader.fingerprint(path, name, options, format, address)

    return FileReader(read, fingerprint, totals.count, "metric of an engine", _HINT, ENGINES)


def ingest_files(
    store: SampleStore,
    paths: Sequence[str | Path],
    options: ReadOptions,
    *,
    format: str | None = None,
    address: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    advance: Advance = lambda count: None,
    on_landed: Callable[[Sequence[FileOutcome]], None] = lambda outcomes: None,
) -> tuple[IngestSummary, EngineTotals]:
    """Ingest ``paths`` as ``metrics.ingest.ingest_files``. Raises as it does."""
    totals = EngineTotals()
    summary = ingest.ingest_files(
        store, paths, options, format=format, again=again, dry_run=dry_run, advance=advance, on_landed=on_landed,
        reader=file_reader(address, totals),
    )  # fmt: skip
    return summary, totals


@dataclass(frozen=True, slots=True)
class Scrape:
    """The response of an endpoint, or the reason why there is none."""

    url: str
    address: str
    time: datetime
    took_s: float
    body: bytes
    error: str | None


def scrape(url: str, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Scrape:
    """Request the metrics at ``url``. Redirects are not followed. Raises ``InputError`` if it is no http URL."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError("is no http URL", where=url, hint="write for example http://gpu01:8000/metrics")
    whole = parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()
    tls: ssl.SSLContext = tls_context(None)
    started, scraped_at = time.monotonic(), now()
    body, error = b"", None
    try:
        response = fetch(whole, headers={"Accept": "text/plain"}, timeout_s=SCRAPE_S, largest=LARGEST_SCRAPE, tls=tls)
        if response.status == 200:
            body = response.body
        else:
            error = f"HTTP {response.status}"
    except HttpError as failed:
        error = str(failed)
    return Scrape(whole, parts.netloc.rpartition("@")[2], scraped_at, time.monotonic() - started, body, error)


def samples_of(
    scraped: Scrape, store: SampleStore, options: ReadOptions, notes: ReadingNotes
) -> Iterator[pl.DataFrame]:
    """Yield the samples of a scrape. One that failed is a sample of each engine seen at the address within a day.

    Raises ``InputError`` if it failed and no engine is known there.
    """
    if scraped.error is not None:
        devices = store.devices(scraped.time - _REMEMBERED, scraped.time).filter(pl.col("address") == scraped.address)
        if devices.is_empty():
            raise InputError(scraped.error, where=scraped.url, hint=_HINT)
        notes.problem(None, f"the scrape failed: {scraped.error}", strict=False)
        row = devices.select(*IDENTITY).with_columns(
            time=pl.lit(scraped.time), scrape_s=pl.lit(scraped.took_s), error=pl.lit(scraped.error)
        )
        yield row.select(
            (pl.col(name) if name in row.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SAMPLES.items()
        )
        return
    timed = replace(options, start=scraped.time, node=options.node or host_of(scraped.address))
    builder = SampleBuilder(notes, SeriesIdentifier(timed, scraped.address))
    lines = blocks_of(scraped.body, notes.name, reject=lambda line, why, _: notes.problem(line, why, strict=False))
    for frame in EngineReader(notes, timed, builder).read(lines):
        yield frame.with_columns(pl.col("scrape_s").fill_null(scraped.took_s))


def ingest_scrapes(
    store: SampleStore, urls: Sequence[str], options: ReadOptions, *, dry_run: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> tuple[IngestSummary, EngineTotals]:  # fmt: skip
    """Scrape each of ``urls`` once and ingest the samples. A failed scrape does not stop the others."""
    totals = EngineTotals()
    run = ingest.SourceRun(options, None, frozenset(), now, lambda count: None, reader=file_reader(None, totals))

    def take(url: str, add: Callable[[Iterator[Prepared], SampleSource], AddedSource]) -> None:
        def read(notes: ReadingNotes) -> tuple[str, Iterator[pl.DataFrame], None]:
            return "scrape", samples_of(scrape(url, now=now), store, options, notes), None

        run.take_from(url, read, add)

    if dry_run:
        for url in urls:
            take(url, ingest.count)
        return run.summary((), None, (), dry_run=True), totals
    with store.writer() as writer:
        for url in urls:
            take(url, writer.add)
    return run.summary((), writer.totals, ()), totals
