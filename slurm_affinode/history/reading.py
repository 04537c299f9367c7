"""What all readers of GPU history share: options, problems, the identity of series, missing values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, tzinfo

import polars as pl

from slurm_affinode import limits
from slurm_affinode.errors import InputError
from slurm_affinode.history.aliases import Aliases
from slurm_affinode.history.identity import node_name, pci_address
from slurm_affinode.history.schema import IDENTITY

KEPT_PROBLEMS = 100
"""Problems of a file that are kept with their text; the rest is counted."""

_DEVICE = re.compile(r"(?:/dev/)?(?:nvidia|gpu)?\s*(\d{1,4})(?:\.0+)?", re.IGNORECASE)
_INDEX_DIGITS = 5
_BARE_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - names that say nothing, nothing is bound
_JOB_SEPARATORS = re.compile(r"[\s,;]+")
_FLOAT = re.compile(r"\d+\.\d*(?:[eE]\+?\d+)?|\d+[eE]\+?\d+")
_NO_JOB = ("", "0", "none", "n/a", "null", "nan")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the files do not say about themselves."""

    aliases: Aliases
    cluster: str | None = None
    """Cluster of every sample, whatever the file says."""
    default_cluster: str = "default"
    """Cluster of samples that name none."""
    node: str | None = None
    """Node of samples that name none; None: from the file or directory name where that is one."""
    zone: tzinfo | None = None
    """Zone of times without one; None: the local zone."""
    start: datetime | None = None
    """Time of the first sample, for formats without times."""
    interval_s: float | None = None
    """Seconds between samples, for formats without times."""
    fields: tuple[str, ...] = ()
    """Column names of tables without a header line."""
    strict: bool = False
    """Whether the first bad line ends the reading."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that was left out."""

    line: int | None
    """From 1; None where the format has no lines."""
    reason: str


@dataclass(slots=True)
class Notes:
    """What a reader noticed in one file."""

    name: str
    """The file, for messages."""
    problems: list[Problem] = field(default_factory=list)
    problem_count: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    """Metric names and column headers that no alias knows."""
    decisions: dict[str, int] = field(default_factory=dict)
    """What was decided and how often, e.g. on local times that exist twice."""

    def problem(self, line: int | None, reason: str, *, strict: bool) -> None:
        """Record a bad line. Raises ``InputError`` with ``strict``."""
        if strict:
            where = self.name if line is None else f"{self.name}:{line}"
            raise InputError(reason, where=where, hint="nothing of this file was taken in (--strict)")
        self.problem_count += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(Problem(line, reason))

    def decide(self, what: str, count: int = 1) -> None:
        """Count a decision."""
        if count:
            self.decisions[what] = self.decisions.get(what, 0) + count


Identity = tuple[str | None, str | None, str | None, str | None, int | None, str | None, str | None, str | None]
"""The columns of ``IDENTITY``, in order."""


class Identifier:
    """Turn raw label or column texts into identities. ``fallback_node`` is used where the source names no node."""

    def __init__(self, options: ReadOptions, fallback_node: str | None) -> None:
        self._options = options
        self._fallback = options.node or fallback_node

    def identify(self, raw: Mapping[str, str]) -> Identity | str:
        """The identity of texts by column of ``IDENTITY``, or the reason why there is none."""
        for name, text in raw.items():
            if why := limits.excess(name, text):
                return f"{name} {why}"
        uuid, pci, index, mig = _marks(raw)
        given = raw.get("node", "")
        node = (None if _is_local(given) else node_name(given)) or self._fallback
        if node is None:
            return "names no node: give --node NAME, or a label or column that names it"
        if uuid is None and pci is None and index is None and mig is None:
            return "names no GPU: neither a UUID nor a PCI address nor an index"
        cluster = self._options.cluster or raw.get("cluster") or self._options.default_cluster
        return (cluster, node, uuid, pci, index, mig, raw.get("mig_profile") or None, raw.get("model") or None)

    def from_labels(self, labels: Mapping[str, str]) -> Identity | str:
        """The identity that the labels of a series name."""
        raw: dict[str, str] = {}
        for column, names in self._options.aliases.labels.items():
            told = [labels[name] for name in names if labels.get(name)]
            if column == "node":  # an exporter in a container may name itself so, and the scrape the machine
                told = [one for one in told if not _is_local(one)]
            if told:
                raw[column] = told[0]
        return self.identify(raw)  # the job ids too: the size of every label is checked

    def job_of(self, labels: Mapping[str, str]) -> str | None:
        """The job ids that the labels of a series name."""
        for name in self._options.aliases.labels.get("job", ()):
            if name in labels:
                return job_ids(labels[name])
        return None


def _is_local(node: str) -> bool:
    """Whether ``node`` is a name that every machine has for itself."""
    return (node_name(node) or "").lower() in _LOCAL


def _marks(raw: Mapping[str, str]) -> tuple[str | None, str | None, int | None, str | None]:
    """UUID, PCI address, index, MIG id; each recognised by its form, also in the wrong column."""
    uuid = pci = mig = None
    index: int | None = None
    mig = _whole(raw.get("mig", "").strip()) or None
    for column in ("uuid", "pci", "index"):
        text = raw.get(column, "").strip()
        if text.startswith("MIG-"):
            # A MIG instance known by its own UUID alone: its parent is not said.
            mig = mig or text
        elif text.startswith("GPU-") or _BARE_UUID.fullmatch(text):
            uuid = uuid or "GPU-" + text.removeprefix("GPU-").lower()
        elif address := pci_address(text):
            pci = pci or address
        elif column == "index" and (match := _DEVICE.fullmatch(text)) and int(match.group(1)) < 2**15:
            index = int(match.group(1))
        elif column == "uuid" and not (number := _whole(text)).isdecimal():
            uuid = uuid or text or None
        elif column == "uuid" and len(number) <= _INDEX_DIGITS and int(number) < 2**15:
            index = int(number)
    return uuid, pci, index, mig


def job_ids(text: str) -> str | None:
    """Job ids in canonical form: sorted, joined by ``,``; None where the text names no job."""
    ids = {_whole(part) for part in _JOB_SEPARATORS.split(text.strip())}
    return ",".join(sorted(one for one in ids if one.lower() not in _NO_JOB)) or None


def _whole(text: str) -> str:
    """``4.2e+07`` and ``123.0`` as the whole numbers they are; anything else as it is.

    Tables in which a number is missing somewhere have it so.
    """
    if not _FLOAT.fullmatch(text):
        return text
    number = float(text)
    return str(int(number)) if 0 <= number < 2**53 and number == int(number) else text


def identity_frame(identities: list[Identity]) -> pl.DataFrame:
    """A frame of ``IDENTITY`` with one row per identity."""
    return pl.DataFrame(identities, schema=IDENTITY, orient="row")


def measured(value: pl.Expr) -> pl.Expr:
    """``value`` (Float64) with everything that means "not measured" as null.

    DCGM's blank values: 32-bit 0x7ffffff0 to 0x7fffffff, 64-bit 0x7ffffffffffffff0 and above, floating point
    140737488355328 to 140737488355343 (``DCGM_*_BLANK``, ``_NOT_FOUND``, ``_NOT_SUPPORTED``, ``_NOT_PERMISSIONED`` in
    ``dcgm_structs.h``); NaN, infinities and negative numbers, which none of the metrics can have.
    """
    blank = (
        value.is_between(0x7FFFFFF0, 0x7FFFFFFF)
        | value.is_between(140737488355328.0, 140737488355343.0)
        | value.is_between(9.2e18, 9.3e18)
        | ~value.is_finite()
        | (value < 0)
    )
    return pl.when(blank).then(None).otherwise(value)


def shows_percent(values: pl.Series) -> bool:
    """Return whether ``values`` of a metric in percent or ratio are percent: one above 1 is no blank value."""
    return bool((values.is_between(1, 110, closed="right")).any())
