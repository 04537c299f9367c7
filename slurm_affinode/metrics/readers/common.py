"""Shared parts of all readers of GPU metrics: options, problems, the identity of series, missing values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import TypeVar

import polars as pl

from slurm_affinode.base import limits
from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.aliases import Aliases
from slurm_affinode.metrics.identity import node_name, pci_address
from slurm_affinode.metrics.schema import IDENTITY

KEPT_PROBLEMS = 100
"""Problems kept with their text per file; the rest is counted."""

_DEVICE = re.compile(r"(?:/dev/)?(?:nvidia|gpu)?\s*(\d{1,4})(?:\.0+)?", re.IGNORECASE)
_INDEX_DIGITS = 5
_BARE_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - names that say nothing, nothing is bound
_JOB_SEPARATORS = re.compile(r"[\s,;]+")
_FLOAT = re.compile(r"\d+\.\d*(?:[eE]\+?\d+)?|\d+[eE]\+?\d+")
_NO_JOB = ("", "0", "none", "n/a", "null", "nan")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Facts that are missing from the files."""

    aliases: Aliases
    cluster: str | None = None
    """Cluster of all samples; overrides the file."""
    default_cluster: str = "default"
    """Cluster of samples without one."""
    node: str | None = None
    """Node of samples without one; None: the node in the file or directory name, if any."""
    zone: tzinfo | None = None
    """Time zone of times without one; None: the local zone."""
    start: datetime | None = None
    """Time of the first sample, for formats without times."""
    interval_s: float | None = None
    """Seconds between samples, for formats without times."""
    fields: tuple[str, ...] = ()
    """Column names of tables without a header line."""
    strict: bool = False
    """Fail at the first bad line."""


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """A rejected line."""

    line: int | None
    """Line number from 1; None for a format without lines."""
    reason: str


@dataclass(slots=True)
class ReadingNotes:
    """Observations of a reader about one file."""

    name: str
    """The file, for messages."""
    problems: list[RejectedLine] = field(default_factory=list)
    problem_count: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    """Metric names and column headers without an alias."""
    decisions: dict[str, int] = field(default_factory=dict)
    """Decision, e.g. on local times that exist twice -> its count."""

    def problem(self, line: int | None, reason: str, *, strict: bool) -> None:
        """Record a bad line. Raises ``InputError`` with ``strict``."""
        if strict:
            where = self.name if line is None else f"{self.name}:{line}"
            raise InputError(reason, where=where, hint="nothing of this file was ingested (--strict)")
        self.problem_count += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(RejectedLine(line, reason))

    def decide(self, what: str, count: int = 1) -> None:
        """Count a decision."""
        if count:
            self.decisions[what] = self.decisions.get(what, 0) + count


Identity = tuple[str | None, str | None, str | None, str | None, int | None, str | None, str | None, str | None]
"""The columns of ``IDENTITY``, in order."""


class Identifier:
    """Convert raw label or column texts to identities. ``fallback_node`` is used if the source names no node."""

    def __init__(self, options: ReadOptions, fallback_node: str | None) -> None:
        self._options = options
        self._fallback = options.node or fallback_node

    def identify(self, raw: Mapping[str, str]) -> Identity | str:
        """Return the identity for texts by column of ``IDENTITY``, or the reason why there is none."""
        for name, text in raw.items():
            if why := limits.excess(name, text):
                return f"{name} {why}"
        uuid, pci, index, mig = _marks(raw)
        name = node_name(raw.get("node", "")) or ""
        node = (None if name.lower() in _LOCAL else name or None) or self._fallback
        if node is None:
            return "names no node: give --node NAME, or a label or column that names it"
        if uuid is None and pci is None and index is None and mig is None:
            return "names no GPU: neither a UUID nor a PCI address nor an index"
        cluster = self._options.cluster or raw.get("cluster") or self._options.default_cluster
        return (cluster, node, uuid, pci, index, mig, raw.get("mig_profile") or None, raw.get("model") or None)

    def from_labels(self, labels: Mapping[str, str]) -> Identity | str:
        """Return the identity for the labels of a series, or the reason why there is none."""
        raw: dict[str, str] = {}
        for column, names in self._options.aliases.labels.items():
            label_values = [labels[name] for name in names if labels.get(name)]
            if column == "node":  # an exporter in a container may use such a name, while the scrape has the node
                label_values = [value for value in label_values if not _is_local(value)]
            if label_values:
                raw[column] = label_values[0]
        return self.identify(raw)  # with job IDs: the size of every label is checked

    def job_of(self, labels: Mapping[str, str]) -> str | None:
        """Return the job IDs in the labels of a series."""
        for name in self._options.aliases.labels.get("job", ()):
            if name in labels:
                return job_ids(labels[name])
        return None


def _is_local(node: str) -> bool:
    """Return whether ``node`` is a name of the local host."""
    return (node_name(node) or "").lower() in _LOCAL


def _marks(raw: Mapping[str, str]) -> tuple[str | None, str | None, int | None, str | None]:
    """Return UUID, PCI address, index and MIG ID; each is recognized by its form, even in the wrong column."""
    uuid = pci = mig = None
    index: int | None = None
    mig = _whole(raw.get("mig", "").strip()) or None
    for column in ("uuid", "pci", "index"):
        text = raw.get(column, "").strip()
        if not text:
            continue
        if text.startswith("MIG-"):
            # A MIG instance known only by its own UUID: its GPU is unknown.
            mig = mig or text
        elif text.startswith("GPU-") or _BARE_UUID.fullmatch(text):
            uuid = uuid or "GPU-" + text.removeprefix("GPU-").lower()
        elif address := pci_address(text):
            pci = pci or address
        elif column == "index" and (match := _DEVICE.fullmatch(text)) and int(match.group(1)) < 2**15:
            index = int(match.group(1))
        elif column == "uuid" and not (number := _whole(text)).isdecimal():
            uuid = uuid or text
        elif column == "uuid" and len(number) <= _INDEX_DIGITS and int(number) < 2**15:
            index = int(number)
    return uuid, pci, index, mig


def job_ids(text: str) -> str | None:
    """Return job IDs in canonical form: sorted, joined by ``,``; None if there are none."""
    ids = {_whole(part) for part in _JOB_SEPARATORS.split(text.strip())}
    return ",".join(sorted(job_id for job_id in ids if job_id.lower() not in _NO_JOB)) or None


def _whole(text: str) -> str:
    """Convert integers written as floats (``4.2e+07``, ``123.0``) to plain digits; return any other text unchanged.

    They occur in columns with missing values.
    """
    if not _FLOAT.fullmatch(text):
        return text
    number = float(text)
    return str(int(number)) if 0 <= number < 2**53 and number == int(number) else text


def identity_frame(identities: list[Identity]) -> pl.DataFrame:
    """Return a frame of ``IDENTITY`` with one row per identity."""
    return pl.DataFrame(identities, schema=IDENTITY, orient="row")


_LEAST_BLANK = 0x7FFFFFF0


def measured(values: pl.Series) -> pl.Series:
    """Return ``values`` (Float64) with null for everything that means "not measured".

    DCGM's blank values: 32-bit 0x7ffffff0 to 0x7fffffff, 64-bit 0x7ffffffffffffff0 and above, floating point
    140737488355328 to 140737488355343 (``DCGM_*_BLANK``, ``_NOT_FOUND``, ``_NOT_SUPPORTED``, ``_NOT_PERMISSIONED`` in
    ``dcgm_structs.h``); NaN, infinities and negative numbers, which none of the metrics can have.
    """
    if values.is_between(0, _LEAST_BLANK, closed="left").all():
        return values
    value = pl.col(values.name)
    blank = (
        value.is_between(_LEAST_BLANK, 0x7FFFFFFF)
        | value.is_between(140737488355328.0, 140737488355343.0)
        | value.is_between(9.2e18, 9.3e18)
        | ~value.is_finite()
        | (value < 0)
    )
    return values.to_frame().select(pl.when(blank).then(None).otherwise(value).alias(values.name)).to_series()


def shows_percent(values: pl.Series) -> bool:
    """Return whether ``values`` of a metric in percent or ratio are in percent: any is above 1 and no blank value."""
    return bool(percent_values(values).any())


_Values = TypeVar("_Values", pl.Series, pl.Expr)


def percent_values(values: _Values) -> _Values:
    """Return which of ``values`` of a metric in percent or ratio can only be in percent."""
    return values.is_between(1, 110, closed="right")
