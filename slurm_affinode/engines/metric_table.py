"""The table of engine metrics (``metric_table.toml``): names by engine and release -> columns of the sample schema.

It is also read by the program that scrapes an engine on a node, so that Polars is not imported here.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

COUNTERS = frozenset({
    "preemptions", "prompt_tokens", "cached_tokens", "generation_tokens", "finished", "failed", "rejected", "ttft_s",
    "ttft_count", "token_latency_s", "token_latency_count", "e2e_s", "e2e_count", "queue_s", "queue_count", "prefill_s",
    "decode_s", "prompt_length", "prompt_length_count", "generation_length", "generation_length_count", "cpu_s",
    "uncollectable",
})  # fmt: skip
"""Metrics that only grow while the engine runs."""
PROCESS = "process"
"""Table of metrics without labels, which describe the process behind an endpoint."""
HELPERS = ("kv_blocks", "kv_blocks_used", "up")
"""Read only to compute ``kv_tokens``, ``kv_usage`` and ``error``."""
BUCKETS = ("prompt_lengths", "generation_lengths")
EXPORTED = "slurm_affinode_serving_"
"""Prefix of the names under which this project's exporter publishes the columns."""
ORPHANED = ("orphaned_processes", "orphaned_memory_mib")
"""Columns that only this project's exporter provides, for an engine whose server has ended."""
EXPORTED_UP = EXPORTED + "up"
"""Whether the exporter's last scrape succeeded. It is 0 only while a process of the job still listens there."""
CONFIGURATION = frozenset({"kv_tokens", "kv_blocks", "block_size", "max_running", "memory_share"})
"""Fields that hold for all models and ranks behind an endpoint if a series names none."""
_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|k|z)?sh|perl|node")
_WITH_VALUE = ("-W", "-X", "-o")
"""Options of interpreters that are followed by a value."""
_MOST_WORDS = 16
_SUMMED = COUNTERS | {"running", "waiting", "waiting_capacity", "swapped"}


@dataclass(frozen=True, slots=True)
class MetricSource:
    """A metric that a column is read from."""

    engine: str
    field: str
    number: int
    """Position in the table: of several sources of a field, the first one with a value is used."""
    where: Mapping[str, tuple[str, ...]]
    unless: Mapping[str, tuple[str, ...]]
    label: str | None
    scale: float
    summed: bool
    """Whether several series of an engine are added; else the largest value is used."""
    attached: bool

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether a series with ``labels`` is a source of the field."""
        return all(labels.get(name) in values for name, values in self.where.items()) and not any(
            labels.get(name) in values for name, values in self.unless.items()
        )


@dataclass(frozen=True, slots=True)
class EngineNames:
    """An engine of the table."""

    title: str
    prefixes: tuple[str, ...]
    model: tuple[str, ...]
    """Labels with the name of the model."""
    rank: tuple[str, ...]
    programs: tuple[str, ...] = ()
    """Patterns of the names of its servers, see ``program_names``."""
    ports: tuple[int, ...] = ()
    """Ports at which it exports metrics by default."""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The parsed table."""

    engines: Mapping[str, EngineNames]
    by_name: Mapping[str, tuple[MetricSource, ...]]
    """Name of a sample, in every spelling -> its sources."""
    sources: tuple[MetricSource, ...]
    """All sources, by number."""


@functools.cache
def load() -> EngineTable:
    """Return the built-in table."""
    text = resources.files("slurm_affinode.engines").joinpath("metric_table.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text))


def parse(data: Mapping[str, Mapping[str, Any]]) -> EngineTable:
    """Build the table from parsed TOML. Raises ``KeyError`` for a damaged one."""
    sources: list[MetricSource] = []
    by_name: dict[str, list[MetricSource]] = {}
    engines = {
        engine: EngineNames(
            table["title"], tuple(table["prefixes"]), tuple(table["model"]), tuple(table["rank"]),
            tuple(table.get("programs", ())), tuple(table.get("ports", ())),
        )
        for engine, table in data.items()
    }  # fmt: skip
    for engine, table in data.items():
        for name, entry in _entries(table):
            source = _source(engine, len(sources), entry)
            sources.append(source)
            for prefix in engines[engine].prefixes:
                for spelled in _spellings(prefix + name):
                    by_name.setdefault(spelled, []).append(source)
    return EngineTable(engines, {name: tuple(same_named) for name, same_named in by_name.items()}, tuple(sources))


def _entries(engine: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for entry in engine["metrics"]:
        yield entry["name"], entry
    for entry in engine["histograms"]:
        for part in ("sum", "count", "bucket"):
            if part in entry:
                yield f"{entry['name']}_{part}", {**entry, "field": entry[part]}


def _source(engine: str, number: int, entry: Mapping[str, Any]) -> MetricSource:
    field = entry["field"]
    aggregate = entry.get("aggregate", "sum" if engine != PROCESS and field in _SUMMED else "max")
    where, unless = (
        {label: tuple(values) for label, values in entry.get(key, {}).items()} for key in ("where", "unless")
    )
    return MetricSource(
        engine, field, number, where, unless, entry.get("label"), float(entry.get("scale", 1.0)), aggregate == "sum",
        bool(entry.get("attached", False)),
    )  # fmt: skip


def _spellings(name: str) -> tuple[str, ...]:
    """Return the names of a sample: clients differ in whether they append ``_total`` to a counter."""
    return (name, name.removesuffix("_total")) if name.endswith("_total") else (name,)


def exported_name(field: str) -> str:
    """Return the name under which the exporter publishes a column."""
    return f"{EXPORTED}{field}_total" if field in COUNTERS else EXPORTED + field


@functools.cache
def exported_fields() -> Mapping[str, str]:
    """Return the names under which the exporter publishes columns, and the columns."""
    plain = {*ORPHANED, *(source.field for source in load().sources)} - {*BUCKETS, *HELPERS}
    return {spelled: field for field in plain for spelled in _spellings(exported_name(field))}


@functools.cache
def exported_buckets() -> Mapping[str, str]:
    """Return the names under which the exporter publishes the buckets of histograms, and their columns."""
    return {f"{EXPORTED}{field}_bucket": field for field in BUCKETS}


def program_names(arguments: Sequence[str]) -> list[str]:
    """Return the names under which a command line is known: its program, and the script or module that it interprets.

    ``arguments``: those of the process, the program first.
    """
    if not arguments:
        return []
    names = [_basename(arguments[0])]
    if _INTERPRETER.fullmatch(names[0]):
        rest = list(arguments[1:_MOST_WORDS])
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            del rest[: 2 if rest[0] in _WITH_VALUE else 1]
        if rest[:1] == ["-m"]:
            names += rest[1:2]
        elif rest and rest[0] != "-c":
            names.append(_basename(rest[0]).removesuffix(".py"))
    return names


def servers_named(names: Iterable[str]) -> list[EngineNames]:
    """Return the engines of which one of these programs is a server."""
    all_names = tuple(names)
    return [
        engine
        for engine in load().engines.values()
        if any(fnmatchcase(name, pattern) for name in all_names for pattern in engine.programs)
    ]


def _basename(path: str) -> str:
    return path.rpartition("/")[2]


EngineLabels = tuple[str, str | None, str | None]
"""Engine, model and rank, as far as the labels of a series name them."""


def owners(keys: Iterable[EngineLabels], makers: Iterable[EngineLabels]) -> dict[EngineLabels, list[EngineLabels]]:
    """Return the engines that the series of each of ``keys`` may belong to, behind one endpoint at one time.

    ``makers`` are those that make an engine. One that is named less completely than another is none itself. Takes time
    proportional to the number of keys, which users choose.
    """
    makers = list(dict.fromkeys(makers))
    covered = _by_pattern(makers)
    whole = [key for key in makers if len(covered[key]) == 1]
    engines_of = _by_pattern(whole)
    whole_keys = {*whole}
    return {
        key: [key] if key in whole_keys else whole if key[0] == PROCESS else engines_of.get(key, []) for key in keys
    }  # fmt: skip


def _by_pattern(keys: Iterable[EngineLabels]) -> dict[EngineLabels, list[EngineLabels]]:
    """Return labels, complete or not -> the keys that agree with them."""
    by_pattern: dict[EngineLabels, list[EngineLabels]] = {}
    for engine, model, rank in keys:
        for pattern in {
            (engine, pattern_model, pattern_rank) for pattern_model in (model, None) for pattern_rank in (rank, None)
        }:
            by_pattern.setdefault(pattern, []).append((engine, model, rank))
    return by_pattern
