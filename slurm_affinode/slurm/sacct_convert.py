"""Cells of sacct text -> typed records, columns at a time. Which column feeds which field is decided here alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl

from slurm_affinode.limits import most_bytes, too_long
from slurm_affinode.slurm import columns, hostlist, jobid, states, times, units
from slurm_affinode.slurm.accounting import Problem, TimeDecision
from slurm_affinode.slurm.records import RECORDS, settle
from slurm_affinode.slurm.sacct_lines import LINE, Block
from slurm_affinode.slurm.sacct_records import printed_name, shorten
from slurm_affinode.slurm.schema import conform

_NEEDED = frozenset({"jobidraw", "jobid", "submit", "start", "end", "alloctres", "allocgres"})
"""Without these a record means nothing or something else: it is left out. Any other field is taken as unknown."""

_TEXTS = {
    "cluster": "cluster", "user": "user", "account": "account", "partition": "partition", "qos": "qos",
    "jobname": "job_name", "reason": "reason", "comment": "comment", "admincomment": "admin_comment",
    "constraints": "constraints", "workdir": "work_dir", "submitline": "submit_line",
}  # fmt: skip


_LIMITED = {
    "alloctres": "alloc_tres", "reqtres": "req_tres", "allocgres": "alloc_tres", "reqgres": "req_tres",
    "tresusageinmax": "tres_usage", "nodelist": "node_list", "jobid": "array_spec", "jobidraw": "array_spec",
}  # fmt: skip
"""Column -> its name in ``limits.FIELD_BYTES``, beside those of ``_TEXTS``."""


class Converter:
    """Converts one block; ``problems`` and ``decisions`` are what was met.

    ``job_starts`` is shared by the blocks of one input: the starts that were decided, for steps in a later block.
    """

    def __init__(self, block: Block, *, zone: str, cluster: str, job_starts: dict[int, datetime] | None = None) -> None:
        self._cells = block.cells
        self._zone = zone
        self._cluster = cluster
        self._out: dict[str, pl.Series] = {}
        self._bad: dict[int, bool] = {}
        self._job_starts = {} if job_starts is None else job_starts
        self.problems: list[Problem] = []
        self.decisions: list[TimeDecision] = []

    def convert(self) -> pl.DataFrame:
        """Convert every field; records that mean nothing are left out."""
        self._out["line"] = self._cells[LINE]
        self._ids()
        self._limit()
        for name, target in _TEXTS.items():
            if (cells := self._column(name)) is not None:
                self._out[target] = cells.set(cells == "", None)
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
        for at in backwards.arg_true().to_list():
            self._problem(at, "end", "End is before Start", needed=True)
        dropped = sorted(at for at, gone in self._bad.items() if gone)
        if dropped:
            keep = pl.repeat(True, frame.height, dtype=pl.Boolean, eager=True).scatter(dropped, [False] * len(dropped))
            frame = frame.filter(keep)
        return frame

    def _limit(self) -> None:
        """Report cells that are too long, and take them as unknown."""
        for name in self._cells.columns:
            if name == LINE:
                continue
            most = most_bytes(_LIMITED.get(name, _TEXTS.get(name, name)))
            size = self._cells[name].str.len_bytes()
            over = (size > most).fill_null(value=False).arg_true()
            if over.is_empty():
                continue
            for at in over.to_list():
                self._problem(at, name, too_long(size[at], most), needed=name in _NEEDED or name == "cluster")
            self._cells = self._cells.with_columns(self._cells[name].scatter(over, None))

    def _column(self, *names: str) -> pl.Series | None:
        """The first of the columns ``names`` that the input has."""
        return next((self._cells[name] for name in names if name in self._cells.columns), None)

    def _problem(self, at: int, name: str, why: str, *, needed: bool) -> None:
        if self._bad.get(at):
            return
        self._bad[at] = needed
        printed = self._out["printed"][at] if "printed" in self._out else None
        reason = f"{why}, so it is unknown" if not needed else why
        self.problems.append(Problem(self._cells[LINE][at], printed, printed_name(name), reason, dropped=needed))

    def _take(self, typed: columns.Typed, name: str, target: str) -> None:
        self._out[target] = typed.values
        self._note(typed.bad, name)

    def _note(self, bad: dict[int, str], name: str) -> None:
        for at, why in bad.items():
            self._problem(at, name, why, needed=name in _NEEDED)

    def _ids(self) -> None:
        printed = self._column("jobid")
        raw = self._column("jobidraw")
        shown = self._cells["jobidraw"] if printed is None else printed
        if raw is not None and printed is not None:
            shown = printed.set(printed == "", None).fill_null(raw)
        self._out["printed"] = shown
        # JobIDRaw alone says it all unless the two differ (array tasks, heterogeneous jobs), and of a step always.
        raw_parts = None if raw is None else _id_parts(raw)
        if raw is None or raw_parts is None:
            groups = _id_parts(self._out["printed"])
        else:
            differs = (self._out["printed"] != raw).fill_null(value=True)
            other = (differs & (raw_parts["step"].is_null() | raw_parts["job"].is_null())).arg_true()
            groups = _replaced(raw_parts, other, _id_parts(self._out["printed"].gather(other)))
        job, task, spec, het, step = (groups.to_series(i) for i in range(5))
        is_array = task.is_not_null() | spec.is_not_null()
        none = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(job))
        self._out["array_job_id"] = job.zip_with(is_array, none)
        self._out["array_task_id"] = task
        self._out["array_spec"] = spec
        self._out["het_job_id"] = job.zip_with(het.is_not_null(), none)
        self._out["het_offset"] = het
        own = (job + het.fill_null(0)).zip_with(task.is_null(), jobid.stand_in(job, task))
        if raw_parts is not None:
            raw_id = raw_parts["job"]
            own = raw_id.zip_with(raw_id.is_not_null() & raw_parts["task"].is_null(), own)
            step = step.zip_with(step.is_not_null(), raw_parts["step"])
        self._out["job_id"] = own
        self._out["step_id"] = step.replace(jobid.SPECIAL_STEPS) if step.null_count() < len(step) else step
        for at in own.is_null().arg_true().to_list():
            text = self._out["printed"][at] or ""
            self._problem(at, "jobid", f"{shorten(text)} is not a job id", needed=True)

    def _state(self) -> None:
        if (cells := self._column("state")) is not None:
            kind = pl.Struct({"state": pl.String, "by": pl.String})
            found = columns.mapped(
                cells, lambda text: dict(zip(("state", "by"), states.parse(text), strict=True)), kind
            )
            self._out["state"] = found.values.struct.field("state")
            self._out["cancelled_by"] = found.values.struct.field("by")
            self._note(found.bad, "state")
        if (cells := self._column("exitcode")) is not None:
            kind = pl.Struct({"code": pl.Int64, "signal": pl.Int64})
            found = columns.mapped(
                cells, lambda text: dict(zip(("code", "signal"), units.parse_exit_code(text), strict=True)), kind
            )
            self._out["exit_code"] = found.values.struct.field("code")
            self._out["exit_signal"] = found.values.struct.field("signal")
            self._note(found.bad, "exitcode")
        if (cells := self._column("uid")) is not None:
            self._take(columns.whole(cells), "uid", "uid")

    def _spans(self) -> None:
        self._first(("elapsedraw", columns.whole), ("elapsed", columns.seconds), target="elapsed_s")
        if (cells := self._column("timelimitraw", "timelimit")) is not None:
            if cells.name == "timelimitraw":
                limit = columns.mapped(cells, _raw_limit_s, pl.Int64())
            else:
                limit = columns.mapped(cells, units.parse_duration_s, pl.Float64())
            self._take(limit, cells.name, "timelimit_s")
            unlimited = cells.str.to_lowercase().is_in(sorted(units.UNLIMITED_WORDS))
            self._out["timelimit_unlimited"] = unlimited.set(~unlimited & limit.values.is_null(), None)

    def _first(self, *choices: tuple[str, Callable[[pl.Series], columns.Typed]], target: str) -> None:
        for name, convert in choices:
            if (cells := self._column(name)) is not None:
                self._take(convert(cells), name, target)
                return

    def _times(self) -> None:
        open_: dict[int, dict[str, datetime]] = {}
        for name in times.ORDER:
            if (cells := self._column(name)) is None:
                continue
            found = columns.moments(cells, self._zone)
            self._out[name] = found.values
            self._note(found.bad, name)
            for at, local in found.open.items():
                open_.setdefault(at, {})[name] = local
        if open_:
            self._decide(open_)
        if {"start", "end"} <= self._out.keys():
            lasted = (self._out["end"] - self._out["start"]).dt.total_seconds()
            self._out["elapsed_s"] = _coalesce(self._out.get("elapsed_s"), lasted)

    def _decide(self, open_: dict[int, dict[str, datetime]]) -> None:
        zone = ZoneInfo(self._zone)
        present = [name for name in times.ORDER if name in self._out]
        chosen: dict[str, dict[int, datetime]] = {name: {} for name in present}
        starts = self._job_starts
        for at in sorted(open_):
            candidates = {
                name: times.readings(open_[at][name], zone) if name in open_[at] else (self._out[name][at],)
                for name in present
                if name in open_[at] or self._out[name][at] is not None
            }
            elapsed = self._out["elapsed_s"][at] if "elapsed_s" in self._out else None
            job, step = self._out["job_id"][at], self._out["step_id"][at]
            picked = times.choose(candidates, elapsed, not_before=starts.get(job) if step is not None else None)
            if step is None and "start" in picked:
                starts[job] = picked["start"]
            for name, local in open_[at].items():
                chosen[name][at] = picked[name]
                line, printed = self._cells[LINE][at], self._out["printed"][at]
                there = times.exists(local, zone)
                self.decisions.append(TimeDecision(line, printed, name, local, picked[name].astimezone(UTC), there))
        for name, values in chosen.items():
            if values:
                series = self._out[name]
                fill = pl.Series(list(values.values()), dtype=series.dtype)
                self._out[name] = series.scatter(list(values), fill)

    def _nodes_and_tres(self) -> None:
        height = self._cells.height
        tres: dict[str, pl.DataFrame] = {}
        for name, target in (("alloctres", "alloc_tres"), ("reqtres", "req_tres")):
            if (cells := self._column(name)) is not None:
                self._out[target] = cells.set(cells == "", None)
                tres[name], bad = columns.tres(cells)
                self._note(bad, name)
                why = tres[name]["gpus_bad"]
                for at in why.is_not_null().arg_true().to_list():
                    self._problem(at, name, why[at], needed=False)
        nothing = pl.DataFrame(schema=columns.TRES).clear(height)
        alloc, req = tres.get("alloctres", nothing), tres.get("reqtres", nothing)
        if (cells := self._column("nodelist")) is not None:
            found = columns.mapped(cells, _node_list, pl.String())
            self._take(found, "nodelist", "node_list")
        self._first(("allocnodes", columns.whole), ("nnodes", columns.whole), target="nodes")
        self._out["nodes"] = _coalesce(self._out.get("nodes"), alloc["node"], self._node_counts())
        self._first(("alloccpus", columns.whole), ("ncpus", columns.whole), target="cpus")
        self._out["cpus"] = _coalesce(self._out.get("cpus"), alloc["cpu"])
        self._out["alloc_mem_bytes"] = alloc["mem"]
        self._requested_memory(req["mem"])
        self._gpus(alloc, req, has_alloc="alloctres" in tres)

    def _node_counts(self) -> pl.Series | None:
        if "node_list" not in self._out or self._out.get("nodes") is not None:
            return None
        return columns.mapped(self._out["node_list"], hostlist.count, pl.Int64()).values

    def _requested_memory(self, from_tres: pl.Series) -> None:
        cells = self._column("reqmem")
        if cells is None:
            self._out["req_mem_bytes"] = from_tres
            return
        kind = pl.Struct({"size": pl.Int64, "per": pl.String})
        found = columns.mapped(cells, _req_mem, kind)
        self._note(found.bad, "reqmem")
        size, per = found.values.struct.field("size"), found.values.struct.field("per")
        if (per != "").any():
            nodes = self._counts("reqnodes", self._out["nodes"])
            cpus = self._counts("reqcpus", self._out["cpus"])
            factor = nodes.zip_with(per == "n", cpus)
            total = (size * factor).set(size.cast(pl.Float64) * factor.cast(pl.Float64) > units.NO_VALUE, None)
            size = total.zip_with(per.is_in(["n", "c"]), size)
        self._out["req_mem_bytes"] = _coalesce(size, from_tres)

    def _counts(self, name: str, fallback: pl.Series) -> pl.Series:
        """What was asked for: requests per node or CPU are of the requested number, not of the allocated one."""
        cells = self._column(name)
        if cells is None:
            return fallback
        wanted = columns.whole(cells).values
        return _coalesce(wanted.set(wanted == 0, None), fallback)

    def _gpus(self, alloc: pl.DataFrame, req: pl.DataFrame, *, has_alloc: bool) -> None:
        count, kind, said = alloc["gpus"], alloc["kind"], None
        if has_alloc:
            said = self._out["alloc_tres"].is_not_null() & alloc["gpus_bad"].is_null()
        if (cells := self._column("allocgres")) is not None:
            old = self._gres(cells, "allocgres")
            count, kind = _coalesce(count, old["gpus"]), _coalesce(kind, old["kind"])
            # AllocGRES is there for every job, empty where there is no GRES, so its column alone says "none".
            said = said if said is not None else pl.repeat(True, len(cells), dtype=pl.Boolean, eager=True)
        wanted, wanted_kind = req["gpus"], req["kind"]
        if (cells := self._column("reqgres")) is not None:
            old = self._gres(cells, "reqgres")
            wanted, wanted_kind = _coalesce(wanted, old["gpus"]), _coalesce(wanted_kind, old["kind"])
        if said is None and "req_tres" in self._out:
            count, kind, said = wanted, wanted_kind, self._out["req_tres"].is_not_null() & req["gpus_bad"].is_null()
        self._out["gpus"], self._out["gpu_type"] = count, _coalesce(kind, wanted_kind)
        self._out["req_gpus"] = wanted
        if said is not None:
            self._out["gpus_said"] = said

    def _gres(self, cells: pl.Series, name: str) -> pl.DataFrame:
        def parts(text: str) -> dict[str, Any]:
            found = units.parse_gres(text)
            return {"gpus": found.count, "kind": found.kind}

        found = columns.mapped(cells, parts, pl.Struct({"gpus": pl.Int64, "kind": pl.String}))
        self._note(found.bad, name)
        return found.values.struct.unnest()

    def _usage(self) -> None:
        if (cells := self._column("ntasks")) is not None:
            self._take(columns.whole(cells), "ntasks", "tasks")
        if (cells := self._column("totalcpu")) is not None:
            self._take(columns.seconds(cells), "totalcpu", "total_cpu_s")
        else:
            parts = [c for name in ("usercpu", "systemcpu") if (c := self._column(name)) is not None]
            spans = [columns.seconds(part) for part in parts]
            for span, part in zip(spans, parts, strict=True):
                self._note(span.bad, part.name)
            if len(spans) == 2:
                known = spans[0].values.is_not_null() | spans[1].values.is_not_null()
                total = spans[0].values.fill_null(0.0) + spans[1].values.fill_null(0.0)
                self._out["total_cpu_s"] = total.set(~known, None)
        if (cells := self._column("maxrss")) is not None:
            self._take(columns.bytes_(cells), "maxrss", "max_rss_bytes")
        self._first(("consumedenergyraw", columns.whole), ("consumedenergy", columns.joules), target="energy_j")
        if (energy := self._out.get("energy_j")) is not None:
            # Without an energy plugin Slurm writes 0, which nothing that ran can have used.
            self._out["energy_j"] = energy.set(energy == 0, None)
        if (cells := self._column("tresusageinmax")) is not None:
            self._high_water(cells)

    def _high_water(self, cells: pl.Series) -> None:
        if "max_rss_bytes" not in self._out:
            memory = columns.bytes_(cells.str.extract(r"(?:^|,)mem=([^,]+)"))
            self._take(memory, "tresusageinmax", "max_rss_bytes")
        where = cells.str.contains("gres/gpu", literal=True).arg_true()
        if where.is_empty():
            return
        told = cells.gather(where)
        util = columns.whole(told.str.extract(r"gres/gpuutil(?::[^=,]*)?=([^,]+)"))
        memory = columns.bytes_(told.str.extract(r"gres/gpumem(?::[^=,]*)?=([^,]+)"))
        positions = where.to_list() if util.bad or memory.bad else []
        for typed, target in ((util, "gpu_util_max_pct"), (memory, "gpu_mem_max_bytes")):
            nothing = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(cells))
            self._out[target] = nothing.scatter(where, typed.values)  # scatter changes its series
            self._note({positions[at]: why for at, why in typed.bad.items()}, "tresusageinmax")


def _id_parts(cells: pl.Series, *, arrays: bool = False) -> pl.DataFrame:
    """The parts of printed ids.

    Most are a number and perhaps a step, many of the rest an array task (``arrays``): those need no regular expression.
    """
    head, step = cells.str.split_exact(".", 1).struct.unnest().get_columns()
    nothing = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(cells))
    task = index = nothing
    if arrays:
        head, index = head.str.split_exact("_", 1).struct.unnest().get_columns()
        task = index.cast(pl.Int64, strict=False)
    job = head.cast(pl.Int64, strict=False)
    plain = pl.DataFrame({"job": job, "task": task, "spec": nothing.cast(pl.String), "het": nothing, "step": step})
    damaged = (job < 0, job > jobid.MAX, task < 0, task >= jobid.TASKS, step == "", step.str.contains(r"[^A-Za-z0-9]"))
    odd = job.is_null() | (index.is_not_null() & task.is_null())
    for mask in damaged:
        odd |= mask.fill_null(value=False)
    where = odd.arg_true()
    if where.is_empty():
        return plain
    left = cells.gather(where)
    if not arrays:
        return _replaced(plain, where, _id_parts(left, arrays=True))
    groups = left.str.strip_chars().str.extract_groups(jobid.PATTERN).struct.unnest()
    groups.columns = plain.columns
    return _replaced(plain, where, groups)


def _replaced(frame: pl.DataFrame, where: pl.Series, rows: pl.DataFrame) -> pl.DataFrame:
    """``frame`` with ``rows`` at the positions ``where``."""
    if where.is_empty():
        return frame
    return frame.select(
        frame[name].scatter(where, rows[name].cast(frame[name].dtype)).alias(name) for name in frame.columns
    )


def _coalesce(*series: pl.Series | None) -> pl.Series:
    found = [one for one in series if one is not None]
    first = found[0]
    for other in found[1:]:
        if not first.has_nulls():
            break
        first = first.zip_with(first.is_not_null(), other.cast(first.dtype))
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
    found = units.parse_memory(text, bare="M")
    return {"size": None if found is None else found.size_bytes, "per": None if found is None else found.per}
