"""Conversion of the series of engines' endpoints to samples: one row per engine and time.

A series names its model and rank, or not: those of a process, and some counters of an API server, belong to the whole
endpoint. If the endpoint has one engine at that time, they are its own. If it has several, configuration and process
are repeated for each of them, and other values are a row without the missing label, as it is not known which engine
they count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl

from slurm_affinode.base import limits
from slurm_affinode.engines import metric_table
from slurm_affinode.engines.metric_table import (
    BUCKETS,
    CONFIGURATION,
    EXPORTED,
    EXPORTED_UP,
    PROCESS,
    EngineLabels,
    EngineTable,
    MetricSource,
)
from slurm_affinode.engines.schema import IDENTITY, METRICS, OWNER, SAMPLES
from slurm_affinode.metrics.identity import node_name
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions, job_ids
from slurm_affinode.metrics.schema import TIME

ENTRIES_AT_ONCE = 1_500_000
MOST_SERIES = 500_000
"""Series of one source; those beyond are reported and left out."""
MOST_LABEL_BYTES = 256 << 20
"""Size of all labels of the series of one source."""
NO_RESPONSE = f"the engine did not respond to the exporter, its process still listens ({EXPORTED_UP} is 0)"
"""Why a scrape by this project's exporter failed: it exports no ``up`` for an engine that has ended."""
NO_SERVER = "connection refused: the server has ended, its processes hold GPU memory"
"""Why there are no values of an engine whose processes this project's exporter found without their server."""
_FUTURE = timedelta(minutes=5)
_SHARES = ("kv_usage", "host_kv_usage", "memory_share")
_NOISE = 1.1
_SHOWS_RESTART = ("preemptions", "prompt_tokens", "generation_tokens", "finished")
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - names that say nothing, nothing is bound

ENTRIES: dict[str, pl.DataType] = {"series": pl.UInt32(), "value": pl.Float64(), "time": TIME}
SCRAPES: dict[str, pl.DataType] = {"time": TIME, "scrape_s": pl.Float64(), "error": pl.String()}
"""Scrapes of a recording, failed ones included."""

_Endpoint = tuple[str, str | None, str, str | None, str | None, str | None]
"""Cluster, node, address; job, user, GPUs."""


@dataclass(frozen=True, slots=True)
class _Combination:
    """Labels of series that tell engines behind one endpoint apart. ``None``: the series has no such label."""

    endpoint: int
    engine: str
    model: str | None
    rank: str | None

    @property
    def labels(self) -> EngineLabels:
        """The labels, without the endpoint."""
        return self.engine, self.model, self.rank


@dataclass(frozen=True, slots=True)
class SeriesIdentifier:
    """Where the series of a source come from."""

    options: ReadOptions
    address: str
    """Address of series without one."""

    def endpoint(self, labels: Mapping[str, str]) -> _Endpoint | str:
        """Return the endpoint of a series, or the reason why it cannot be used."""
        names = self.options.aliases.labels
        address = labels.get("address") or labels.get("instance") or self.address
        named = next(
            (labels[label] for label in names["node"] if labels.get(label) and not _is_local(labels[label])), address
        )
        cluster = self.options.cluster or next((labels[label] for label in names["cluster"] if labels.get(label)), None)
        job = next((job_ids(labels[label]) for label in names["job"] if label in labels), None)
        node = self.options.node or (host_of(named) if named != self.address else None)
        user, gpus = labels.get("user") or None, labels.get("gpus") or None
        for field, text in (("address", address), ("cluster", cluster), ("job", job), ("user", user), ("uuid", gpus)):
            if text is not None and (why := limits.excess(field, text)):
                return f"{field} {why}"
        return (cluster or self.options.default_cluster, node, address, job, user, gpus)


def _is_local(text: str) -> bool:
    return (node_name(text) or "").lower() in _LOCAL


def host_of(text: str) -> str | None:
    """Return the short name of the host in an address; None if it is a name of the local host."""
    return None if _is_local(text) else node_name(text)


class SampleBuilder:
    """Collect the values of series and return samples. Memory is bounded by ``entries_at_once`` and ``MOST_SERIES``."""

    def __init__(
        self, notes: ReadingNotes, identifier: SeriesIdentifier, *, entries_at_once: int = ENTRIES_AT_ONCE
    ) -> None:
        self._notes = notes
        self._identifier = identifier
        self._limit = entries_at_once
        self._table: EngineTable = metric_table.load()
        self._endpoints: dict[_Endpoint, int] = {}
        self._combinations: dict[_Combination, int] = {}
        self._indexed_combinations: list[_Combination] = []
        self._defining: set[int] = set()
        """Combinations with a series that makes an engine."""
        self._series: list[tuple[int, int, float | None, float | None]] = []
        """Combination, source, value of a label, upper bound of a bucket."""
        self._sources: list[MetricSource] = list(self._table.sources)
        self._exported: dict[tuple[str, str], int] = {}
        self._label_bytes = 0
        self._entries: list[pl.DataFrame] = []
        self._count = 0
        self._scrapes: list[pl.DataFrame] = []
        self._last_engines: pl.DataFrame | None = None
        self._last_counters: pl.DataFrame | None = None
        self._failures: list[tuple[int, datetime, str]] = []
        """Endpoint, time, reason."""

    # -- series -------------------------------------------------------------------------------------------------

    def knows(self, name: str) -> bool:
        """Return whether a column is read from the metric ``name``."""
        exported = (
            name in metric_table.exported_fields() or name in metric_table.exported_buckets() or name == EXPORTED_UP
        )
        return exported or name in self._table.by_name

    def series(self, name: str, labels: Mapping[str, str]) -> list[int] | str:
        """Return the numbers of a series, one for each column read from it, or the reason why it cannot be used."""
        self._label_bytes += sum(len(label) + len(text) for label, text in labels.items()) + 200
        if len(self._series) >= MOST_SERIES or self._label_bytes > MOST_LABEL_BYTES:
            return f"is skipped: there are more than {MOST_SERIES:,} series, or their labels are too long"
        if name.startswith(EXPORTED):
            return self._exported_columns(name, labels)
        numbers: list[int] = []
        for source in self._table.by_name[name]:
            if source.matches(labels):
                number = self._add_series(source, source.number, labels)
                if isinstance(number, str):
                    return number
                numbers.append(number)
        return numbers

    def _exported_columns(self, name: str, labels: Mapping[str, str]) -> list[int] | str:
        engine = labels.get("engine", "")
        field = (
            "up" if name == EXPORTED_UP else {**metric_table.exported_fields(), **metric_table.exported_buckets()}[name]
        )
        if engine not in self._table.engines or engine == PROCESS:
            return f"{engine[:60]!r} is no engine of the table"
        number = self._exported.get((engine, field))
        if number is None:
            number = self._exported[engine, field] = len(self._sources)
            self._sources.append(MetricSource(engine, field, number, {}, {}, None, 1.0, summed=False, attached=False))
        outcome = self._add_series(self._sources[number], number, labels, model=("model",), rank=("rank",))
        return outcome if isinstance(outcome, str) else [outcome]

    def _add_series(
        self, source: MetricSource, number: int, labels: Mapping[str, str], *,
        model: Sequence[str] | None = None, rank: Sequence[str] | None = None,
    ) -> int | str:  # fmt: skip
        endpoint = self._identifier.endpoint(labels)
        if isinstance(endpoint, str):
            return endpoint
        names = self._table.engines[source.engine]
        served = next((labels[label] for label in model or names.model if labels.get(label)), None)
        ranked = next((labels[label] for label in rank or names.rank if labels.get(label)), None)
        for field, text in (("model", served), ("rank", ranked)):
            if text is not None and (why := limits.excess(field, text)):
                return f"{field} {why}"
        endpoint_index = self._endpoints.setdefault(endpoint, len(self._endpoints))
        combination = _Combination(endpoint_index, source.engine, served, ranked)
        index = self._combinations.setdefault(combination, len(self._combinations))
        if index == len(self._indexed_combinations):
            self._indexed_combinations.append(combination)
        if not source.attached and source.engine != PROCESS:
            self._defining.add(index)
        constant = None if source.label is None else _number(labels.get(source.label))
        if source.label is not None and constant is None:
            constant = float("nan")
        bound = _number(labels.get("le")) if source.field in BUCKETS else None
        self._series.append((index, number, constant, bound))
        return len(self._series) - 1

    def failed(self, labels: Mapping[str, str], times: Sequence[datetime], reason: str) -> None:
        """Add scrapes of an endpoint that failed. They count for the engines that it was found to have."""
        endpoint = self._identifier.endpoint(labels)
        if not isinstance(endpoint, str):
            endpoint_index = self._endpoints.setdefault(endpoint, len(self._endpoints))
            self._failures += [(endpoint_index, time, reason) for time in times]

    # -- values -------------------------------------------------------------------------------------------------

    def add(self, entries: pl.DataFrame, scrapes: pl.DataFrame | None = None) -> Iterator[pl.DataFrame]:
        """Add ``ENTRIES`` and ``SCRAPES``; yield samples once enough are held, except of the latest time."""
        if scrapes is not None and len(scrapes):
            self._scrapes.append(scrapes)
        if entries.is_empty():
            return
        self._entries.append(entries)
        self._count += len(entries)
        if self._count >= self._limit:
            rows = pl.concat(self._entries)
            complete = rows["time"] < rows["time"].max()
            rest = rows.filter(~complete)
            # A file sorted by series may have its latest time anywhere, so everything held is returned.
            ready = rows.filter(complete) if 2 * len(rest) < len(rows) else rows
            self._entries = [rest] if ready is not rows else []
            self._count = sum(len(frame) for frame in self._entries)
            yield from self._samples(ready, last=False)

    def rest(self) -> Iterator[pl.DataFrame]:
        """Yield the samples that are still held."""
        rows = pl.concat(self._entries) if self._entries else pl.DataFrame(schema=ENTRIES)
        self._entries, self._count = [], 0
        yield from self._samples(rows, last=True)
        yield from self._failed()

    def _failed(self) -> Iterator[pl.DataFrame]:
        failures, self._failures = self._failures, []
        engines_of: dict[int, list[int]] = {}
        for endpoint in {endpoint for endpoint, _, _ in failures}:
            combination_indexes = [
                index for combination, index in self._combinations.items() if combination.endpoint == endpoint
            ]
            engines_of[endpoint] = sorted({to for _, to in self._resolved(combination_indexes)})
        rows = [(to, time, reason) for endpoint, time, reason in failures for to in engines_of[endpoint]]
        if rows:
            schema = {"at": pl.UInt32(), "time": TIME, "error": pl.String()}
            yield self._identified(pl.DataFrame(rows, schema=schema, orient="row"))

    def _samples(self, rows: pl.DataFrame, *, last: bool) -> Iterator[pl.DataFrame]:
        frame = self._wide(rows) if len(rows) else None
        if frame is not None and frame.is_empty():
            frame = None
        yield from self._with_scrapes(frame, last=last)

    def _wide(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return one row per engine and time. ``at``: the index of its combination of endpoint and labels."""
        series_frame = pl.DataFrame(
            self._series,
            schema={"at": pl.UInt32(), "source": pl.UInt32(), "constant": pl.Float64(), "le": pl.Float64()},
            orient="row",
        )
        # The same series twice at one time: the last value counts.
        differ = (pl.col("value").min() != pl.col("value").max()).fill_null(value=False)
        rows = rows.group_by("series", "time").agg(pl.col("value").last(), differ.alias("differ"))
        self._notes.decide("values of a series at the same time differ: the last one counts", int(rows["differ"].sum()))
        value = pl.coalesce(series_frame["constant"].gather(rows["series"]), pl.col("value"))
        sound = pl.when(value.is_finite() & (value >= 0)).then(value)
        entries = rows.select(
            *(series_frame[name].gather(rows["series"]).alias(name) for name in ("at", "source", "le")), "time",
            sound.alias("value"),
        )  # fmt: skip
        entries = self._assigned(entries)
        if entries.is_empty():
            return entries
        bucketed = [source.number for source in self._sources if source.field in BUCKETS]
        is_bucket = pl.col("source").is_in(bucketed)
        plain = entries.filter(~is_bucket)
        wide = self._fields(plain)
        for field in BUCKETS:
            numbers = [source.number for source in self._sources if source.field == field]
            wide = wide.join(_histograms(entries.filter(pl.col("source").is_in(numbers)), field),
                             on=["at", "time"], how="left")  # fmt: skip
        wide = self._checked(wide)
        self._note_restarts(wide)
        return wide

    def _assigned(self, entries: pl.DataFrame) -> pl.DataFrame:
        """Replace each combination by the engines that it belongs to; drop what belongs to none."""
        combinations = self._indexed_combinations
        where = pl.Series([combination.endpoint for combination in combinations], dtype=pl.UInt32)
        present: dict[int, list[int]] = {}
        for index in entries["at"].unique().sort():
            present.setdefault(combinations[index].endpoint, []).append(index)
        single, several = [], []
        pairs: list[tuple[int, int, int]] = []
        for endpoint, indexes in present.items():
            resolved = self._resolved(indexes)
            if len({to for _, to in resolved}) <= 1:
                single.append(endpoint)
                pairs += [(0, *pair) for pair in resolved]
            else:
                several.append(endpoint)
        entries = entries.with_columns(where.gather(entries["at"]).alias("endpoint"), pl.lit(0, pl.UInt32).alias("set"))
        if several:
            mixed = entries.filter(pl.col("endpoint").is_in(several))
            groups = mixed.group_by("endpoint", "time").agg(pl.col("at").unique().sort().alias("members"))
            groups = groups.with_columns(_dense(groups))
            for number, members in groups.unique("set").select("set", "members").iter_rows():
                pairs += [(number, *pair) for pair in self._resolved(members)]
            mixed = mixed.drop("set").join(groups.select("endpoint", "time", "set"), on=["endpoint", "time"])
            entries = pl.concat([entries.filter(pl.col("endpoint").is_in(single)), mixed.select(entries.columns)])
        # Configuration and process are repeated for each engine, all other values have one place.
        mapping = pl.DataFrame(pairs, orient="row", schema={"set": pl.UInt32(), "at": pl.UInt32(), "to": pl.UInt32()})
        shared = [
            source.number for source in self._sources if source.engine == PROCESS or source.field in CONFIGURATION
        ]  # fmt: skip
        placed = mapping.group_by("set", "at").agg(
            pl.when(pl.len() == 1).then(pl.col("to").first()).otherwise(pl.col("at").first()).alias("to")
        )
        is_shared = pl.col("source").is_in(shared)
        parts = [
            entries.filter(is_shared).join(mapping, on=["set", "at"]),
            entries.filter(~is_shared).join(placed, on=["set", "at"]),
        ]
        return pl.concat(parts).select(pl.col("to").alias("at"), "source", "le", "time", "value")

    def _resolved(self, indexes: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs of a combination and an engine that it belongs to, for the combinations seen at one time."""
        labels_by_index = {index: self._indexed_combinations[index].labels for index in indexes}
        numbers = {labels: index for index, labels in labels_by_index.items()}
        owners = metric_table.owners(
            numbers, (labels for index, labels in labels_by_index.items() if index in self._defining)
        )
        return [(index, numbers[owner]) for index, labels in labels_by_index.items() for owner in owners[labels]]

    def _fields(self, entries: pl.DataFrame) -> pl.DataFrame:
        """Return ``at``, ``time`` and the plain columns of the schema."""
        entries = entries.with_columns(pl.col("source").cast(pl.UInt16))
        key = ["at", "time", "source"]
        several = entries.group_by(key).agg(
            pl.col("value").sum().alias("sum"), pl.col("value").max().alias("max"), pl.col("value").count().alias("n")
        )
        summed = [metric.number for metric in self._sources if metric.summed]
        total = (
            pl.when(pl.col("n") == 0).then(None).when(pl.col("source").is_in(summed)).then("sum").otherwise("max")
        )  # fmt: skip
        values = several.select(*key, total.alias("value"))
        numbers = sorted(values["source"].unique())
        wide = values.pivot(on="source", index=["at", "time"], values="value", aggregate_function="first")
        columns: dict[str, list[pl.Expr]] = {}
        for number in numbers:
            source = self._sources[number]
            columns.setdefault(source.field, []).append(pl.col(str(number)) * source.scale)
        wide = wide.select("at", "time", *(pl.coalesce(sources).alias(field) for field, sources in columns.items()))
        blank = [pl.lit(None, pl.Float64).alias(name) for name in (*METRICS, *metric_table.HELPERS)
                 if name not in wide.columns and name not in BUCKETS]  # fmt: skip
        wide = wide.with_columns(blank)
        share = pl.when(pl.col("kv_blocks") > 0).then(pl.col("kv_blocks_used") / pl.col("kv_blocks"))
        return wide.with_columns(
            pl.coalesce("kv_tokens", pl.col("kv_blocks") * pl.col("block_size")).alias("kv_tokens"),
            pl.coalesce("kv_usage", share).alias("kv_usage"),
            (pl.col("asleep") > 0).alias("asleep"),
            pl.when(pl.col("orphaned_processes") > 0).then(pl.lit(NO_SERVER))
            .when(pl.col("up") == 0).then(pl.lit(NO_RESPONSE)).alias("error"),
        )  # fmt: skip

    def _checked(self, wide: pl.DataFrame) -> pl.DataFrame:
        """Set impossible shares to unknown; note samples of the future."""
        beyond = {name: pl.col(name) > _NOISE for name in _SHARES}
        counts = wide.select(**{name: excessive.sum() for name, excessive in beyond.items()}).row(0, named=True)
        for name, count in counts.items():
            self._notes.decide(f"values of {name} above 1 are impossible and count as not measured", count)
        late = int((wide["time"] > datetime.now(UTC) + _FUTURE).sum())
        self._notes.decide("samples lie in the future: a clock is wrong", late)
        return wide.with_columns(
            pl.when(~excessive).then(pl.col(name)).alias(name) for name, excessive in beyond.items()
        )

    def _note_restarts(self, wide: pl.DataFrame) -> None:
        """Note counters that went back."""
        counters = wide.select("at", "time", *_SHOWS_RESTART).sort("at", "time")
        rows = counters if self._last_counters is None else pl.concat([self._last_counters, counters])
        rows = rows.sort("at", "time", maintain_order=True)
        back = pl.any_horizontal(pl.col(name).forward_fill().diff().over("at") < 0 for name in _SHOWS_RESTART)
        self._notes.decide(
            "times the counters of an engine decreased: it was restarted, or several engines respond at its address",
            int(rows.select(back.fill_null(value=False).sum()).item()),
        )
        self._last_counters = rows.group_by("at", maintain_order=True).last()

    # -- scrapes ------------------------------------------------------------------------------------------------

    def _with_scrapes(self, wide: pl.DataFrame | None, *, last: bool) -> Iterator[pl.DataFrame]:
        """Add the durations of scrapes, and a row for each failed one and engine last seen before it."""
        if not self._scrapes:
            if wide is not None:
                yield self._identified(wide)
            return
        scrapes = pl.concat(self._scrapes).unique("time", keep="last", maintain_order=True).sort("time")
        if wide is None:
            if not last:
                return
            engines_by_time = pl.DataFrame(schema={"time": TIME, "engines": pl.List(pl.UInt32)})
        else:
            until = wide["time"].max()
            self._scrapes = [] if last else [scrapes.filter(pl.col("time") > until)]
            wide = wide.drop("scrape_s", "error").join(scrapes, on="time", how="left")
            engines_by_time = wide.group_by("time").agg(pl.col("at").unique().alias("engines")).sort("time")
            yield self._identified(wide)
            if not last:
                scrapes = scrapes.filter(pl.col("time") <= until)
        failed = scrapes.filter(pl.col("error").is_not_null())
        if self._last_engines is not None:
            engines_by_time = pl.concat([self._last_engines, engines_by_time])
        if len(engines_by_time):
            self._last_engines = engines_by_time.tail(1)
        if failed.is_empty():
            return
        if engines_by_time.is_empty():
            self._notes.problem(
                None, f"{len(failed):,} failed scrapes are skipped: no scrape identifies the engine", strict=False
            )
            return
        failed = failed.join_asof(engines_by_time, on="time", strategy="backward")
        first = engines_by_time["engines"].head(1)
        failed = failed.with_columns(pl.col("engines").fill_null(pl.lit(first)))
        yield self._identified(failed.explode("engines", empty_as_null=False).rename({"engines": "at"}))

    def _identified(self, wide: pl.DataFrame) -> pl.DataFrame:
        """Return ``SAMPLES`` for rows with ``at``."""
        endpoints = list(self._endpoints)
        whole = [
            (
                *endpoints[combination.endpoint][:3],
                combination.engine,
                combination.model,
                combination.rank,
                *endpoints[combination.endpoint][3:],
            )
            for combination in self._indexed_combinations
        ]
        table = pl.DataFrame(whole, schema={**IDENTITY, **OWNER}, orient="row")
        identified = wide.with_columns(table[name].gather(wide["at"]).alias(name) for name in table.columns)
        return identified.select(
            (pl.col(name) if name in identified.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SAMPLES.items()
        ).sort(*IDENTITY, "time", nulls_last=False)


def _dense(groups: pl.DataFrame) -> pl.Series:
    """Return a number for each distinct pair of endpoint and members, from 1."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    dense = [
        numbers.setdefault((endpoint, tuple(members)), len(numbers) + 1)
        for endpoint, members in groups.select("endpoint", "members").iter_rows()
    ]
    return pl.Series("set", dense, dtype=pl.UInt32)


def _histograms(entries: pl.DataFrame, field: str) -> pl.DataFrame:
    """Return ``at``, ``time`` and the buckets of a histogram; none where the last bound is not infinite."""
    bounds = entries.group_by("at", "time", "le").agg(pl.col("value").sum().alias("count")).sort("at", "time", "le")
    rows = bounds.drop_nulls().group_by("at", "time", maintain_order=True).agg(
        pl.struct("le", "count").alias(field), pl.col("le").last().alias("last")
    )  # fmt: skip
    return rows.filter(pl.col("last").is_infinite()).select("at", "time", field)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
