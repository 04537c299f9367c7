"""Column-wise conversion of sacct text to typed records, with a list of unreadable cells.

Each converter is the vectorized form of a function in ``units``, ``times``, ``records`` or ``identifiers`` and calls
that function for the distinct values that the fast path cannot parse.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast
from zoneinfo import ZoneInfo

import polars as pl

from slurm_affinode.base.columns import native
from slurm_affinode.base.limits import most_bytes, too_long
from slurm_affinode.slurm import hostlist, identifiers, times, units
from slurm_affinode.slurm.accounting import records
from slurm_affinode.slurm.accounting.records import RECORDS, settle
from slurm_affinode.slurm.accounting.sacct_lines import LINE, CellBlock, limit, printed_name, shorten
from slurm_affinode.slurm.accounting.schema import TIME, Problem, TimeDecision, conform

_MOST_KNOWN = 100_000
"""Cells of a column whose values are kept for the next block."""
_SPECIAL_DIGITS = len(next(iter(identifiers.SPECIAL_STEPS)))
_FACTORS = {suffix: factor for suffix, factor in units.SCALE.items() if suffix not in ("", "E")}


@dataclass(frozen=True, slots=True)
class Typed:
    """A typed column and its unreadable cells (null in ``values``)."""

    values: pl.Series
    bad: dict[int, str]
    """Row index -> error."""


class KnownCells:
    """Values of the cells of a column that earlier blocks had: most blocks have few new ones."""

    def __init__(self) -> None:
        self.values: pl.Series | None = None
        self.places: dict[str | None, int] = {}
        """Cell -> its place in ``values``."""
        self.wrong: dict[str | None, str] = {}
        """Unreadable cell -> error."""


Cells = pl.Series | native.Column
"""A column as text, or as the compiled library has converted it."""


def mapped(cells: Cells, function: Callable[[str], Any], dtype: pl.DataType, cache: KnownCells | None = None) -> Typed:
    """Apply ``function`` to each distinct cell once; ``ValueError`` from it marks the cell as bad.

    ``cache``: the results of earlier calls with the same function, to which those of this call are added.
    """
    cache = cache or KnownCells()
    if cache.values is None or len(cache.values) > _MOST_KNOWN:
        cache.values, cache.places, cache.wrong = pl.Series([None], dtype=dtype), {None: 0}, {}
    encoded = cells if isinstance(cells, native.Encoded) else _encoded(as_text(cells))
    keys = encoded.distinct.to_list()
    if new := [key for key in keys if key not in cache.places]:
        out: list[Any] = []
        for key in new:
            cache.places[key] = len(cache.places)
            try:
                out.append(function(key))
            except (ValueError, OverflowError) as error:
                out.append(None)
                cache.wrong[key] = str(error)
        cache.values = pl.concat([cache.values, pl.Series(out, dtype=dtype, strict=False)], rechunk=True)
    values = encoded.spread(cache.values[[cache.places[key] for key in keys]])
    return Typed(values.rename(cells.name), _positions(encoded, keys, cache.wrong))


def _encoded(cells: pl.Series) -> native.Encoded:
    cells = cells.set(cells == "", None)
    distinct = cells.unique(maintain_order=True)
    places = distinct.to_frame("cell").with_row_index("place")
    joined = cells.to_frame("cell").join(places, on="cell", how="left", maintain_order="left", nulls_equal=True)
    return native.Encoded(cells.name, distinct, joined["place"])


def _positions(encoded: native.Encoded, keys: list[str | None], wrong: dict[str | None, str]) -> dict[int, str]:
    unreadable = [index for index, key in enumerate(keys) if key in wrong] if wrong else []
    if not unreadable:
        return {}
    rows = encoded.places.is_in(pl.Series(unreadable, dtype=pl.UInt32).implode()).arg_true()
    places = encoded.places.gather(rows).to_list()
    return {index: wrong[keys[place]] for index, place in zip(rows.to_list(), places, strict=True)}


def as_text(cells: Cells) -> pl.Series:
    """Return the cells of a column that has not been converted to values; an empty one may be null."""
    if isinstance(cells, native.Encoded):
        return cells.spread(cells.distinct).rename(cells.name)
    return cast("pl.Series", cells)


def of_distinct(cells: Cells, function: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Apply ``function`` to the cells, or once to each distinct one."""
    return cells.spread(function(cells.distinct)) if isinstance(cells, native.Encoded) else function(as_text(cells))


def merged(values: pl.Series, odd: native.Ints, typed: Typed) -> Typed:
    """Return ``values`` with the result for the rows ``odd``."""
    return Typed(values.scatter(odd, typed.values), {int(odd[index]): why for index, why in typed.bad.items()})


def _fallback(cells: pl.Series, quick: pl.Series, function: Callable[[str], Any]) -> Typed:
    """Return ``quick`` with ``function`` applied where it is null although the cell is not empty."""
    if quick.null_count() == cells.null_count():  # of a null cell, quick is null
        return Typed(quick, {})
    open_ = quick.is_null() & cells.is_not_null() & (cells != "")
    if not open_.any():
        return Typed(quick, {})
    where = open_.arg_true()
    slow = mapped(cells.gather(where), function, quick.dtype)
    values = quick.scatter(where, slow.values) if slow.values.null_count() < len(where) else quick
    positions = where.to_list() if slow.bad else []
    return Typed(values, {positions[index]: why for index, why in slow.bad.items()})


def _conversion(convert: Callable[[pl.Series], Typed]) -> Callable[[Cells], Typed]:
    """Return ``convert`` such that a column with one value, such as ``00:00:00``, is converted once.

    Of a column that the library has converted, only the odd cells are.
    """

    def of_text(cells: pl.Series) -> Typed:
        first = cells[0] if len(cells) > 1 else None
        if first is not None and (cells == first).all(ignore_nulls=False):
            typed = convert(cells.head(1))
            bad = dict.fromkeys(range(len(cells)), typed.bad[0]) if typed.bad else {}
            return Typed(typed.values.new_from_index(0, len(cells)), bad)
        return convert(cells)

    @functools.wraps(convert)
    def of_column(cells: Cells) -> Typed:
        if isinstance(cells, native.Parsed):
            values, odd = cells.values[0], cells.odd
            return merged(values, odd, of_text(cells.cells)) if len(odd) else Typed(values, {})
        return of_text(as_text(cells))

    return of_column


@_conversion
def whole(cells: pl.Series) -> Typed:
    """Convert counts: ``12``, also ``1.5K`` (1024-based)."""
    quick = cells.cast(pl.Int64, strict=False)
    return _fallback(cells, quick.set(quick > units.NO_VALUE, None), units.parse_count)


@_conversion
def joules(cells: pl.Series) -> Typed:
    """Convert ConsumedEnergy to joules: ``4217``, also ``1.5K`` (1000-based)."""
    quick = cells.cast(pl.Int64, strict=False)
    return _fallback(cells, quick.set(quick > units.NO_VALUE, None), units.parse_joules)


@_conversion
def seconds(cells: pl.Series) -> Typed:
    """Convert time spans such as ``[DD-]HH:MM:SS[.frac]`` to seconds, with the fraction."""
    plain = cells.str.contains(r"^\d+:\d+(?::\d+)?(?:\.\d+)?$").fill_null(value=False)
    first, second, third = cells.str.split_exact(":", 2).struct.unnest().get_columns()
    leading, following = first.cast(pl.Int64, strict=False), second.cast(pl.Float64, strict=False)
    clock = leading * 3600 + following * 60 + third.cast(pl.Float64, strict=False)
    quick = clock.zip_with(third.is_not_null(), leading * 60 + following)
    odd = (~plain).arg_true()
    days = odd.filter(cells.gather(odd).str.contains("-", literal=True).fill_null(value=False))
    quick = quick.set(~plain | (quick > units.MAX_SECONDS).fill_null(value=False), None)
    if not days.is_empty():
        quick = quick.scatter(days, _with_days(cells.gather(days)))
    return _fallback(cells, quick.rename(cells.name), units.parse_duration_s)


def _with_days(cells: pl.Series) -> pl.Series:
    groups = cells.str.extract_groups(r"^(\d+)-(\d+):(\d+):(\d+(?:\.\d+)?)$").struct.unnest()
    days, hours, minutes, secs = groups.cast(pl.Float64).get_columns()
    total = days * 86400 + hours * 3600 + minutes * 60 + secs
    return total.set(total > units.MAX_SECONDS, None)


@_conversion
def bytes_(cells: pl.Series) -> Typed:
    """Convert sizes to bytes; a number without a suffix is bytes (see ``units.parse_memory``)."""
    factor: int | pl.Series
    suffix = next(iter(cells.drop_nulls().head(1).str.slice(-1)), "")
    if suffix in _FACTORS and cells.str.ends_with(suffix).all():
        factor, digits = _FACTORS[suffix], cells.str.head(-1)
    else:
        last = cells.str.slice(-1)
        factor = last.replace_strict(_FACTORS, default=1, return_dtype=pl.Int64)
        digits = cells.str.head(-1).zip_with(last.is_in(list(_FACTORS)).fill_null(value=False), cells)
    number = digits.cast(pl.Int64, strict=False)
    # A number so large that the bytes overflow is Slurm's "not set", which the slow path handles.
    quick = number.set(number >= units.NO_VALUE // factor, None) * factor

    def slow(text: str) -> int | None:
        memory = units.parse_memory(text)
        return None if memory is None else memory.size_bytes

    return _fallback(cells, quick.rename(cells.name), slow)


@dataclass(frozen=True, slots=True)
class Times:
    """A column of times in UTC, with its unreadable and its ambiguous cells."""

    values: pl.Series
    """``TIME``; of an ambiguous cell, the first reading."""
    bad: dict[int, str]
    """Row index -> error."""
    open: dict[int, Any]
    """Row index -> naive local time with two readings."""


def moments(cells: Cells, zone: str) -> Times:
    """Convert times in any form that ``times.parse`` accepts; those without an offset are local in ``zone``."""
    if isinstance(cells, native.Parsed):
        naive, odd = cells.values[0], cells.odd
        if not len(odd):
            local, open_ = _local(naive, zone)
            return Times(local, {}, open_)
        rest = moments(cells.cells, zone)
        local, open_ = _local(naive, zone)
        row_of_place = {place: int(odd[place]) for place in {*rest.bad, *rest.open}}
        return Times(
            local.scatter(odd, rest.values),
            {row_of_place[place]: why for place, why in rest.bad.items()},
            dict(sorted({**open_, **{row_of_place[place]: moment for place, moment in rest.open.items()}}.items())),
        )
    cells = as_text(cells)
    naive = cells.str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ms", strict=False, exact=True)
    possible = naive.is_between(*times.POSSIBLE, closed="left")
    if not possible.all():
        naive = naive.set(~possible, None)
    if naive.null_count() == cells.null_count():  # of a null cell, naive is null
        local, open_ = _local(naive, zone)
        return Times(local.rename(cells.name), {}, open_)
    utc = pl.Series(cells.name, [None], dtype=TIME).new_from_index(0, len(cells))
    if (cells.str.len_bytes() > 19).any():
        utc = _with_offset(cells, utc)
    unparsed = naive.is_null() & utc.is_null() & cells.is_not_null()
    slow = mapped(cells.filter(unparsed), times.normalise, pl.String()) if unparsed.any() else None
    bad: dict[int, str] = {}
    if slow is not None:
        where = unparsed.arg_true()
        positions = where.to_list()
        bad = {positions[index]: why for index, why in slow.bad.items()}
        ends_z = slow.values.str.ends_with("Z").fill_null(value=False)
        parsed = slow.values.str.strip_suffix("Z").str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ms")
        naive = naive.scatter(where.filter(~ends_z), parsed.filter(~ends_z))
        utc = utc.scatter(where.filter(ends_z), parsed.filter(ends_z).dt.replace_time_zone("UTC"))
    local, open_ = _local(naive, zone)
    return Times(utc.zip_with(utc.is_not_null(), local).rename(cells.name), bad, open_)


def _with_offset(cells: pl.Series, utc: pl.Series) -> pl.Series:
    """Convert times with an offset (``2025-05-02T14:09:39+02:00``, ``+0200``, ``Z``); each offset is parsed once."""
    offset = mapped(cells.str.slice(19), _offset_ms, pl.Int64()).values
    if offset.null_count() == len(cells):
        return utc
    stamp = cells.str.slice(0, 19).str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ms", strict=False)
    stamp = stamp.set(~stamp.is_between(*times.POSSIBLE, closed="left"), None)
    return (stamp - offset.cast(pl.Duration("ms"))).dt.replace_time_zone("UTC").cast(TIME)


def _offset_ms(text: str) -> int | None:
    if text in ("Z", "z"):
        return 0
    match = re.fullmatch(r"([+-])(\d\d):?([0-5]\d)", text)
    if match is None:
        return None
    minutes = int(match[2]) * 60 + int(match[3])
    return minutes * 60_000 * (-1 if match[1] == "-" else 1)


def _local(naive: pl.Series, zone: str) -> tuple[pl.Series, dict[int, Any]]:
    if zone == "UTC" or naive.null_count() == len(naive):
        return naive.dt.replace_time_zone("UTC").cast(TIME), {}
    first = naive.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null").dt.convert_time_zone("UTC")
    last = naive.dt.replace_time_zone(zone, ambiguous="latest", non_existent="null").dt.convert_time_zone("UTC")
    doubtful = (first != last).fill_null(value=False) | (first.is_null() & naive.is_not_null())
    if not doubtful.any():
        return first.cast(TIME), {}
    where = doubtful.arg_true().to_list()
    return first.cast(TIME), {index: naive[index] for index in where}


TRES = {
    "cpu": pl.Int64(), "mem": pl.Int64(), "node": pl.Int64(), "energy": pl.Int64(), "gpus": pl.Int64(),
    "kind": pl.String(), "gpus_bad": pl.String(),
}  # fmt: skip


def tres_columns(cells: Cells, cache: KnownCells | None = None) -> tuple[pl.DataFrame, dict[int, str]]:
    """Parse TRES strings to the columns of ``TRES`` (``mem`` in bytes); also return the unreadable cells.

    ``gpus_bad`` is the error of an unreadable number of GPUs; the rest of that cell is used.
    """

    def parts(text: str) -> dict[str, Any]:
        amounts = units.parse_tres(text)
        memory = units.parse_memory(amounts.get("mem", ""), bare="M")
        gpus, bad = units.GpuCounts(None), None
        try:
            gpus = units.gpus_of_tres(amounts)
        except ValueError as error:
            bad = str(error)
        return {
            **{name: units.parse_count(amounts.get(name, "")) for name in ("cpu", "node", "energy")},
            "mem": None if memory is None else memory.size_bytes,
            "gpus": gpus.count,
            "kind": gpus.kind,
            "gpus_bad": bad,
        }

    typed = mapped(cells, parts, pl.Struct(TRES), cache)
    return typed.values.struct.unnest(), typed.bad


_NEEDED = frozenset({"jobidraw", "jobid", "submit", "start", "end", "alloctres", "allocgres"})
"""Columns that must be readable, or the record is dropped. Any other unreadable field becomes unknown."""

_TEXTS = {
    "cluster": "cluster", "user": "user", "account": "account", "partition": "partition", "qos": "qos",
    "jobname": "job_name", "reason": "reason", "comment": "comment", "admincomment": "admin_comment",
    "constraints": "constraints", "workdir": "work_dir", "submitline": "submit_line",
}  # fmt: skip


class Shared:
    """State that the blocks of an input share."""

    def __init__(self) -> None:
        self.job_starts: dict[int, datetime] = {}
        """Chosen starts of jobs, for steps in a later block."""
        self.known_cells: defaultdict[str, KnownCells] = defaultdict(KnownCells)


class Converter:
    """Converter of one block, which collects ``problems`` and ``decisions``."""

    def __init__(self, block: CellBlock, *, zone: str, cluster: str, shared: Shared | None = None) -> None:
        self._cells = block.cells
        self._converted = block.converted
        self._zone = zone
        self._cluster = cluster
        self._out: dict[str, pl.Series] = {}
        self._bad: dict[int, bool] = {}
        shared = shared or Shared()
        self._job_starts, self._known_cells = shared.job_starts, shared.known_cells
        self.problems: list[Problem] = []
        self.decisions: list[TimeDecision] = []

    def convert(self) -> pl.DataFrame:
        """Convert all fields; unusable records are dropped."""
        self._out["line"] = self._cells[LINE]
        self._ids()
        self._limit()
        for name, target in _TEXTS.items():
            if (cells := self._column(name)) is not None:
                self._out[target] = self._text(cells)
        if "cluster" not in self._out:
            self._out["cluster"] = pl.Series("cluster", [self._cluster]).new_from_index(0, self._cells.height)
        else:
            self._out["cluster"] = self._out["cluster"].fill_null(self._cluster)
        self._state()
        self._spans()
        self._times()
        self._nodes_and_tres()
        self._usage()
        columns_ = {name: series.alias(name) for name, series in self._out.items()}
        frame = settle(conform(pl.DataFrame(columns_), RECORDS))
        backwards = (frame["end"] < frame["start"]).fill_null(value=False)
        for row in backwards.arg_true().to_list():
            self._problem(row, "end", "End is before Start", needed=True)
        dropped = sorted(row for row, gone in self._bad.items() if gone)
        if dropped:
            keep = pl.repeat(True, frame.height, dtype=pl.Boolean, eager=True).scatter(dropped, [False] * len(dropped))
            frame = frame.filter(keep)
        return frame

    def _limit(self) -> None:
        """Report cells that are too long, and set them to unknown."""
        if self._cells.is_empty() or self._converted is not None:
            return
        longest = self._cells.select(pl.exclude(LINE).str.len_bytes().max()).row(0, named=True)
        for name, longest_bytes in longest.items():
            most = most_bytes(limit(name))
            if longest_bytes is None or longest_bytes <= most:
                continue
            size = self._cells[name].str.len_bytes()
            over = (size > most).fill_null(value=False).arg_true()
            for row in over.to_list():
                self._problem(row, name, too_long(size[row], most), needed=name in _NEEDED or name == "cluster")
            self._cells = self._cells.with_columns(self._cells[name].scatter(over, None))

    def _column(self, *names: str) -> Cells | None:
        """Return the first of the columns ``names`` that the input has."""
        if self._converted is not None:
            return next((self._converted[name] for name in names if name in self._converted), None)
        return next((self._cells[name] for name in names if name in self._cells.columns), None)

    @staticmethod
    def _text(cells: Cells) -> pl.Series:
        texts = as_text(cells)
        return texts if isinstance(cells, native.Encoded) else texts.set(texts == "", None)

    def _problem(self, row: int, name: str, why: str, *, needed: bool) -> None:
        if self._bad.get(row):
            return
        self._bad[row] = needed
        printed = (self._out["printed"][row] or None) if "printed" in self._out else None
        reason = f"{why}, so it is unknown" if not needed else why
        self.problems.append(Problem(self._cells[LINE][row], printed, printed_name(name), reason, dropped=needed))

    def _take(self, typed: Typed, name: str, target: str) -> None:
        self._out[target] = typed.values
        self._note(typed.bad, name)

    def _note(self, bad: dict[int, str], name: str) -> None:
        for row, why in bad.items():
            self._problem(row, name, why, needed=name in _NEEDED)

    def _ids(self) -> None:
        printed, raw = self._column("jobid", "jobidraw"), self._column("jobidraw")
        raw_parts = None if raw is None else _id_parts(raw)
        shown, groups = self._shown(cast("Cells", printed), raw, raw_parts)  # a header has one of the two columns
        self._out["printed"] = shown
        job, task, spec, het, step = (groups.to_series(i) for i in range(5))
        is_array = task.is_not_null() | spec.is_not_null()
        none = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(job))
        self._out["array_job_id"] = job.zip_with(is_array, none)
        self._out["array_task_id"] = task
        self._out["array_spec"] = spec
        self._out["het_job_id"] = job.zip_with(het.is_not_null(), none)
        self._out["het_offset"] = het
        job_ids = (job + het.fill_null(0)).zip_with(task.is_null(), identifiers.stand_in(job, task))
        if raw_parts is not None:
            raw_id = raw_parts["job"]
            job_ids = raw_id.zip_with(raw_id.is_not_null() & raw_parts["task"].is_null(), job_ids)
            step = step.zip_with(step.is_not_null(), raw_parts["step"])
        self._out["job_id"] = job_ids
        if (step.str.len_bytes() == _SPECIAL_DIGITS).any():
            step = step.replace(identifiers.SPECIAL_STEPS)
        self._out["step_id"] = step
        for row in job_ids.is_null().arg_true().to_list():
            text = self._out["printed"][row] or ""
            self._problem(row, "jobid", f"{shorten(text)} is not a job ID", needed=True)

    @staticmethod
    def _shown(printed: Cells, raw: Cells | None, raw_parts: pl.DataFrame | None) -> tuple[pl.Series, pl.DataFrame]:
        """Return the IDs as printed, and their parts."""
        if raw is None or raw_parts is None:
            return _id_texts(printed), _id_parts(printed)
        # JobIDRaw alone suffices for steps, and unless JobID differs from it (array tasks, heterogeneous jobs).
        incomplete = raw_parts["step"].is_null() | raw_parts["job"].is_null()
        if isinstance(printed, native.Parsed):
            parts = _id_parts(printed)
            names = parts.columns
            return _id_texts(printed), pl.DataFrame(parts[name].zip_with(incomplete, raw_parts[name]) for name in names)
        raw, printed = as_text(raw), as_text(printed)
        shown = printed.set(printed == "", None).fill_null(raw)
        other_rows = (incomplete & (shown != raw).fill_null(value=True)).arg_true()
        return shown, _replaced(raw_parts, other_rows, _id_parts(shown.gather(other_rows)))

    def _state(self) -> None:
        if (cells := self._column("state")) is not None:
            kind = pl.Struct({"state": pl.String, "by": pl.String})
            typed = mapped(
                cells,
                lambda text: dict(zip(("state", "by"), records.parse(text), strict=True)),
                kind,
                self._known_cells["state"],
            )
            self._out["state"] = typed.values.struct.field("state")
            self._out["cancelled_by"] = typed.values.struct.field("by")
            self._note(typed.bad, "state")
        if (cells := self._column("exitcode")) is not None:
            kind = pl.Struct({"code": pl.Int64, "signal": pl.Int64})
            typed = mapped(
                cells,
                lambda text: dict(zip(("code", "signal"), units.parse_exit_code(text), strict=True)),
                kind,
                self._known_cells["exitcode"],
            )
            self._out["exit_code"] = typed.values.struct.field("code")
            self._out["exit_signal"] = typed.values.struct.field("signal")
            self._note(typed.bad, "exitcode")
        if (cells := self._column("uid")) is not None:
            self._take(whole(cells), "uid", "uid")

    def _spans(self) -> None:
        self._first(("elapsedraw", whole), ("elapsed", seconds), target="elapsed_s")
        self._first(("suspended", seconds), target="suspended_s")
        self._first(("priority", whole), target="priority")
        if (cells := self._column("timelimitraw", "timelimit")) is not None:
            if cells.name == "timelimitraw":
                limit = mapped(cells, _raw_limit_s, pl.Int64(), self._known_cells[cells.name])
            else:
                limit = mapped(cells, units.parse_duration_s, pl.Float64(), self._known_cells[cells.name])
            self._take(limit, cells.name, "timelimit_s")
            words = sorted(units.UNLIMITED_WORDS)
            unlimited = of_distinct(cells, lambda texts: texts.str.to_lowercase().is_in(words))
            self._out["timelimit_unlimited"] = unlimited.set(~unlimited & limit.values.is_null(), None)

    def _first(self, *choices: tuple[str, Callable[[Cells], Typed]], target: str) -> None:
        for name, convert in choices:
            if (cells := self._column(name)) is not None:
                self._take(convert(cells), name, target)
                return

    def _times(self) -> None:
        open_: dict[int, dict[str, datetime]] = {}
        for name in times.ORDER:
            if (cells := self._column(name)) is None:
                continue
            typed = moments(cells, self._zone)
            self._out[name] = typed.values
            self._note(typed.bad, name)
            for row, local in typed.open.items():
                open_.setdefault(row, {})[name] = local
        doubt = self._decide(open_) if open_ else {}
        none = pl.repeat(0, self._cells.height, dtype=pl.Int64, eager=True)
        self._out["time_doubt_s"] = none.scatter(list(doubt), list(doubt.values())) if doubt else none
        if {"start", "end"} <= self._out.keys():
            lasted = (self._out["end"] - self._out["start"]).dt.total_seconds()
            if (suspended := self._out.get("suspended_s")) is not None:
                lasted = (lasted - suspended.fill_null(0)).clip(0)
            self._out["elapsed_s"] = _coalesce(self._out.get("elapsed_s"), lasted)

    def _decide(self, open_: dict[int, dict[str, datetime]]) -> dict[int, int]:
        """Choose between the readings of local times; return by how many seconds jobs may be later (row -> doubt)."""
        zone = ZoneInfo(self._zone)
        present = [name for name in times.ORDER if name in self._out]
        chosen: dict[str, dict[int, datetime]] = {name: {} for name in present}
        starts = self._job_starts
        doubt: dict[int, int] = {}
        suspended = self._out.get("suspended_s")
        for row in sorted(open_):
            candidates = {
                name: times.readings(open_[row][name], zone) if name in open_[row] else (self._out[name][row],)
                for name in present
                if name in open_[row] or self._out[name][row] is not None
            }
            elapsed = self._out["elapsed_s"][row] if "elapsed_s" in self._out else None
            if elapsed is not None and suspended is not None:
                elapsed += suspended[row] or 0  # Elapsed is without the time in which the job was suspended
            job, step = self._out["job_id"][row], self._out["step_id"][row]
            picked = times.choose(candidates, elapsed, not_before=starts.get(job) if step is not None else None)
            if step is None and "start" in picked:
                starts[job] = picked["start"]
                if doubt_s := times.doubt_s(candidates, elapsed):
                    doubt[row] = doubt_s
            for name, local in open_[row].items():
                chosen[name][row] = picked[name]
                line, printed = self._cells[LINE][row], self._out["printed"][row]
                exists = times.exists(local, zone)
                self.decisions.append(TimeDecision(line, printed, name, local, picked[name].astimezone(UTC), exists))
        for name, values in chosen.items():
            if values:
                series = self._out[name]
                fill = pl.Series(list(values.values()), dtype=series.dtype)
                self._out[name] = series.scatter(list(values), fill)
        return doubt

    def _nodes_and_tres(self) -> None:
        height = self._cells.height
        tres: dict[str, pl.DataFrame] = {}
        for name, target in (("alloctres", "alloc_tres"), ("reqtres", "req_tres")):
            if (cells := self._column(name)) is not None:
                self._out[target] = self._text(cells)
                tres[name], bad = tres_columns(cells, self._known_cells[name])
                self._note(bad, name)
                why = tres[name]["gpus_bad"]
                unreadable = why.is_not_null().arg_true().to_list() if why.null_count() < height else ()
                for row in unreadable:
                    self._problem(row, name, why[row], needed=False)
        for name in ("alloctres", "reqtres"):
            if name not in tres:
                tres[name] = pl.DataFrame(schema=TRES).clear(height)
        alloc, req = tres["alloctres"], tres["reqtres"]
        if (cells := self._column("nodelist")) is not None:
            typed = mapped(cells, _node_list, pl.String(), self._known_cells["nodelist"])
            self._take(typed, "nodelist", "node_list")
        self._first(("allocnodes", whole), ("nnodes", whole), target="nodes")
        self._out["nodes"] = _coalesce(self._out.get("nodes"), alloc["node"], self._node_counts())
        self._first(("alloccpus", whole), ("ncpus", whole), target="cpus")
        self._out["cpus"] = _coalesce(self._out.get("cpus"), alloc["cpu"])
        self._out["alloc_mem_bytes"] = alloc["mem"]
        self._requested_memory(req["mem"])
        self._gpus(alloc, req, has_alloc="alloc_tres" in self._out)

    def _node_counts(self) -> pl.Series | None:
        if "node_list" not in self._out or self._out.get("nodes") is not None:
            return None
        return mapped(self._out["node_list"], hostlist.count, pl.Int64(), self._known_cells["nodes"]).values

    def _requested_memory(self, from_tres: pl.Series) -> None:
        cells = self._column("reqmem")
        if cells is None:
            self._out["req_mem_bytes"] = from_tres
            return
        kind = pl.Struct({"size": pl.Int64, "per": pl.String})
        typed = mapped(cells, _req_mem, kind, self._known_cells["reqmem"])
        self._note(typed.bad, "reqmem")
        size, per = typed.values.struct.field("size"), typed.values.struct.field("per")
        if (per != "").any():
            nodes = self._counts("reqnodes", self._out["nodes"])
            cpus = self._counts("reqcpus", self._out["cpus"])
            factor = nodes.zip_with(per == "n", cpus)
            total = (size * factor).set(size.cast(pl.Float64) * factor.cast(pl.Float64) > units.NO_VALUE, None)
            size = total.zip_with(per.is_in(["n", "c"]), size)
        self._out["req_mem_bytes"] = _coalesce(size, from_tres)

    def _counts(self, name: str, fallback: pl.Series) -> pl.Series:
        """Return the requested number: requests per node or CPU refer to it, not to the allocated number."""
        cells = self._column(name)
        if cells is None:
            return fallback
        requested = whole(cells).values
        return _coalesce(requested.set(requested == 0, None), fallback)

    def _gpus(self, alloc: pl.DataFrame, req: pl.DataFrame, *, has_alloc: bool) -> None:
        count, kind, recorded = alloc["gpus"], alloc["kind"], None
        if has_alloc:
            recorded = self._out["alloc_tres"].is_not_null() & alloc["gpus_bad"].is_null()
        if (cells := self._column("allocgres")) is not None:
            old = self._gres(cells, "allocgres")
            count, kind = _coalesce(count, old["gpus"]), _coalesce(kind, old["kind"])
            # AllocGRES is empty for jobs without GRES, so the presence of the column is enough to mean "none".
            if recorded is None:
                recorded = pl.repeat(True, self._cells.height, dtype=pl.Boolean, eager=True)
        requested, requested_kind = req["gpus"], req["kind"]
        if (cells := self._column("reqgres")) is not None:
            old = self._gres(cells, "reqgres")
            requested, requested_kind = _coalesce(requested, old["gpus"]), _coalesce(requested_kind, old["kind"])
        if recorded is None and "req_tres" in self._out:
            count, kind, recorded = (
                requested,
                requested_kind,
                self._out["req_tres"].is_not_null() & req["gpus_bad"].is_null(),
            )
        self._out["gpus"], self._out["gpu_type"] = count, _coalesce(kind, requested_kind)
        self._out["req_gpus"] = requested
        if recorded is not None:
            self._out["gpus_said"] = recorded

    def _gres(self, cells: Cells, name: str) -> pl.DataFrame:
        def parts(text: str) -> dict[str, Any]:
            counts = units.parse_gres(text)
            return {"gpus": counts.count, "kind": counts.kind}

        typed = mapped(cells, parts, pl.Struct({"gpus": pl.Int64, "kind": pl.String}), self._known_cells[name])
        self._note(typed.bad, name)
        return typed.values.struct.unnest()

    def _usage(self) -> None:
        if (cells := self._column("ntasks")) is not None:
            self._take(whole(cells), "ntasks", "tasks")
        if (cells := self._column("totalcpu")) is not None:
            self._take(seconds(cells), "totalcpu", "total_cpu_s")
        else:
            parts = [c for name in ("usercpu", "systemcpu") if (c := self._column(name)) is not None]
            spans = [seconds(part) for part in parts]
            for span, part in zip(spans, parts, strict=True):
                self._note(span.bad, part.name)
            if len(spans) == 2:
                self._out["total_cpu_s"] = spans[0].values + spans[1].values  # unknown if a part is
        if (cells := self._column("maxrss")) is not None:
            self._take(bytes_(cells), "maxrss", "max_rss_bytes")
        self._first(("consumedenergyraw", whole), ("consumedenergy", joules), target="energy_j")
        if (energy := self._out.get("energy_j")) is not None:
            # Without an energy plugin Slurm writes 0, which is not a possible consumption.
            self._out["energy_j"] = energy.set(energy == 0, None)
        if (cells := self._column("tresusageinmax")) is not None:
            self._high_water(cells)

    def _high_water(self, cells: Cells) -> None:
        if "max_rss_bytes" not in self._out:
            memory = bytes_(as_text(cells).str.extract(r"(?:^|,)mem=([^,]+)"))
            self._take(memory, "tresusageinmax", "max_rss_bytes")
        for typed, target in zip(_gpu_usage(cells), ("gpu_util_max_pct", "gpu_mem_max_bytes"), strict=True):
            self._take(typed, "tresusageinmax", target)


def _gpu_usage(cells: Cells) -> tuple[Typed, Typed]:
    """Return the largest utilization in percent and the largest memory in bytes of GPUs."""
    if isinstance(cells, native.Parsed):
        if not len(cells.odd):
            return Typed(cells.values[0], {}), Typed(cells.values[1], {})
        util, memory = _gpu_usage(cells.cells)
        return merged(cells.values[0], cells.odd, util), merged(cells.values[1], cells.odd, memory)
    texts = as_text(cells)
    where = texts.str.contains("gres/gpu", literal=True).arg_true()
    usage = texts.gather(where)
    missing, odd = pl.repeat(None, len(texts), dtype=pl.Int64, eager=True), where.to_numpy()
    return (
        merged(missing, odd, whole(usage.str.extract(r"gres/gpuutil(?::[^=,]*)?=([^,]+)"))),
        merged(missing.clone(), odd, bytes_(usage.str.extract(r"gres/gpumem(?::[^=,]*)?=([^,]+)"))),
    )


def _missing(dtype: pl.DataType, count: int) -> pl.Series:
    return pl.Series([None], dtype=dtype).new_from_index(0, count)


def _id_texts(cells: Cells) -> pl.Series:
    return cast("pl.Series", cells.texts) if isinstance(cells, native.Parsed) else as_text(cells)


def _id_parts(cells: Cells, *, arrays: bool = False) -> pl.DataFrame:
    """Split printed IDs into their parts.

    Most IDs are a number with or without a step, and many others array tasks (``arrays``): both are parsed without a
    regular expression.
    """
    if isinstance(cells, native.Parsed):
        job, task, step = cells.values
        parts = pl.DataFrame({"job": job, "task": task, "spec": _missing(pl.String(), len(job)),
                              "het": _missing(pl.Int64(), len(job)), "step": step})  # fmt: skip
        return _replaced(parts, pl.Series(cells.odd), _id_parts(cells.cells)) if len(cells.odd) else parts
    cells = as_text(cells)
    head, step = cells.str.split_exact(".", 1).struct.unnest().get_columns()
    missing = _missing(pl.Int64(), len(cells))
    task = index = missing
    if arrays:
        head, index = head.str.split_exact("_", 1).struct.unnest().get_columns()
        task = index.cast(pl.Int64, strict=False)
    job = head.cast(pl.Int64, strict=False)
    plain = pl.DataFrame({"job": job, "task": task, "spec": missing.cast(pl.String), "het": missing, "step": step})
    damaged = (
        job < 0,
        job > identifiers.MAX,
        task < 0,
        task >= identifiers.TASKS,
        step == "",
        step.str.contains(r"[^A-Za-z0-9]"),
    )
    odd = job.is_null() | (index.is_not_null() & task.is_null())
    for mask in damaged:
        odd |= mask.fill_null(value=False)
    where = odd.arg_true()
    if where.is_empty():
        return plain
    remaining = cells.gather(where)
    if not arrays:
        return _replaced(plain, where, _id_parts(remaining, arrays=True))
    groups = remaining.str.strip_chars().str.extract_groups(identifiers.PATTERN).struct.unnest()
    groups.columns = plain.columns
    return _replaced(plain, where, groups)


def _replaced(frame: pl.DataFrame, where: pl.Series, rows: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with ``rows`` at the positions ``where``."""
    if where.is_empty():
        return frame
    return frame.select(
        frame[name].scatter(where, rows[name].cast(frame[name].dtype)).alias(name) for name in frame.columns
    )


def _coalesce(*series: pl.Series | None) -> pl.Series:
    columns = [column for column in series if column is not None]
    first = columns[0]
    for next_column in columns[1:]:
        if not first.has_nulls():
            break
        first = first.zip_with(first.is_not_null(), next_column.cast(first.dtype))
    return first


def _raw_limit_s(text: str) -> int | None:
    if units.is_unknown(text) or units.is_unlimited(text):
        return None
    return int(text) * 60 if len(text) < 12 else None


def _node_list(text: str) -> str | None:
    if hostlist.is_none(text):
        return None
    hostlist.count(text)
    return text.strip()


def _req_mem(text: str) -> dict[str, Any]:
    memory = units.parse_memory(text, bare="M")
    return {"size": None if memory is None else memory.size_bytes, "per": None if memory is None else memory.per}
