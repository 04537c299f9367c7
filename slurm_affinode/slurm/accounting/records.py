"""Assembly of typed accounting records of any format into runs and their steps.

Only this module decides to which run a step belongs, what counts as a GPU, and how missing fields are filled. Job
states are accepted as long words, as two-letter codes, and truncated as in sacct's narrow columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl

from slurm_affinode.model.cluster import ENDED_STATES
from slurm_affinode.slurm.accounting.schema import JOB_KEY, JOBS, STEP_KEY, STEPS, TIME, Problem, conform, empty

STATES = {
    "BOOT_FAIL": "BF",
    "CANCELLED": "CA",
    "COMPLETED": "CD",
    "COMPLETING": "CG",
    "CONFIGURING": "CF",
    "DEADLINE": "DL",
    "FAILED": "F",
    "NODE_FAIL": "NF",
    "OUT_OF_MEMORY": "OOM",
    "PENDING": "PD",
    "PREEMPTED": "PR",
    "REQUEUED": "RQ",
    "REQUEUE_FED": "RF",
    "REQUEUE_HOLD": "RH",
    "RESIZING": "RS",
    "RESV_DEL_HOLD": "RD",
    "REVOKED": "RV",
    "RUNNING": "R",
    "SIGNALING": "SI",
    "SPECIAL_EXIT": "SE",
    "STAGE_OUT": "SO",
    "STOPPED": "ST",
    "SUSPENDED": "S",
    "TIMEOUT": "TO",
}
_SHORT = {short: word for word, short in STATES.items()}
_BY = re.compile(r"^(CANCELLED|CA) by (.+)$", re.IGNORECASE)
_WORD = re.compile(r"^[A-Z][A-Z_]+$")


def parse(text: str) -> tuple[str | None, str | None]:
    """Return the job state and who canceled the job: ``CANCELLED by 1000`` is ``("CANCELLED", "1000")``.

    A truncated word (``OUT_OF_ME+``, ``COMPLETI``) is completed if only one state begins with it; ``COMPLET`` is
    COMPLETED. States of later Slurm releases are kept. Raises ``ValueError``.
    """
    clean = text.strip()
    if not clean or clean.lower() in ("unknown", "none"):
        return None, None
    if match := _BY.match(clean):
        return "CANCELLED", match[2].strip()
    cut = clean.endswith("+")
    word = clean.rstrip("+").upper()
    if word in STATES:
        return word, None
    if word in _SHORT and not cut:
        return _SHORT[word], None
    starts = [state for state in STATES if state.startswith(word)] if len(word) >= 3 else []
    if "COMPLETED" in starts:
        return "COMPLETED", None
    if len(starts) == 1:
        return starts[0], None
    if word.startswith("CANCELLED B"):  # "CANCELLED b+"
        return "CANCELLED", None
    if _WORD.match(word) and not starts and not cut:
        return word, None
    raise ValueError(f"{text!r} is not a job state")


RECORDS: dict[str, pl.DataType] = {
    "line": pl.Int64(),
    "printed": pl.String(),  # the ID as printed, for messages
    **JOBS,
    "step_id": pl.String(),  # None: an allocation
    "tasks": pl.Int64(),
    "gpu_util_max_pct": pl.Float64(),
    "gpu_mem_max_bytes": pl.Int64(),
    "gpus_said": pl.Boolean(),  # the record lists the allocation, so an absent GPU count may mean 0
}
"""One row per record as read; ``submit`` is the record's own."""

_JOB_COLUMNS = ["line", "gpus_said", *JOBS]
_STEP_COLUMNS = ["line", "printed", "gpus_said", *("job_name" if name == "step_name" else name for name in STEPS)]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RUN = ("cluster", "job_id")
_FINAL_STATES = sorted(ENDED_STATES | {"REQUEUED"})


def _gpu_clusters(records: pl.DataFrame) -> frozenset[str]:
    """Return the clusters with a record, of a job or a step, that has allocated or requested GPUs."""
    named = pl.col("gpus").is_not_null() | pl.col("req_gpus").is_not_null()
    return frozenset(records.select(pl.col("cluster").filter(named).unique()).to_series().to_list())


def settle(records: pl.DataFrame) -> pl.DataFrame:
    """Return ``records`` with missing ends filled, and without allocations in records that never started.

    Without ``End``, a run that is over ended ``Elapsed`` and ``Suspended`` after its start. The GPUs, nodes and CPUs of
    a record that never started are only the request.
    """
    if records["end"].has_nulls() and (over := endless(records)).any():
        ended = over & pl.col("elapsed_s").is_not_null()
        lasted_s = pl.col("elapsed_s") + pl.col("suspended_s").fill_null(0)
        lasted = pl.duration(milliseconds=lasted_s * 1000, time_unit="ms")
        records = records.with_columns(pl.when(ended).then(pl.col("start") + lasted).otherwise("end").alias("end"))
    if not records["start"].has_nulls():
        return records
    started = pl.col("start").is_not_null()
    return records.with_columns(pl.when(started).then(name).alias(name) for name in ("gpus", "nodes", "cpus"))


def endless(records: pl.DataFrame) -> pl.Series:
    """Return a mask of the ``records`` of runs that are over and have a start but no end."""
    over = pl.col("start").is_not_null() & pl.col("end").is_null() & pl.col("state").is_in(_FINAL_STATES)
    return records.select(over.fill_null(value=False)).to_series()


@dataclass(frozen=True, slots=True)
class Divided:
    """Records by kind, of one block or of a whole input."""

    jobs: pl.DataFrame
    """``line``, ``gpus_said`` and ``JOBS``."""
    steps: pl.DataFrame
    """``line``, ``printed``, ``gpus_said`` and ``STEPS``, with the step's own ``submit`` and ``job_name``."""
    gpu_clusters: frozenset[str]
    """Clusters with a record, of a job or a step, that has allocated or requested GPUs."""
    stand_ins: int
    """Number of records whose job ID is a substitute."""
    endless: int
    """Number of runs that are over and have a start but no end."""

    @property
    def height(self) -> int:
        """Number of records."""
        return self.jobs.height + self.steps.height


def divide(records: pl.DataFrame) -> Divided:
    """Return ``records`` (``RECORDS``) by kind, each with only the columns of its kind."""
    is_step = records["step_id"].is_not_null()
    return Divided(
        records.select(_JOB_COLUMNS).filter(~is_step),
        records.select(_STEP_COLUMNS).filter(is_step),
        _gpu_clusters(records),
        int((records["job_id"] < 0).sum()),
        int((endless(records) & ~is_step).sum()),
    )


def joined(blocks: list[Divided]) -> Divided:
    """Return the blocks of an input as one. Empties ``blocks``, so that a column of them is freed when it is joined."""
    if not blocks:
        return divide(empty(RECORDS))
    clusters = frozenset[str]().union(*(block.gpu_clusters for block in blocks))
    stand_ins, over = sum(block.stand_ins for block in blocks), sum(block.endless for block in blocks)
    jobs, steps = [block.jobs.get_columns() for block in blocks], [block.steps.get_columns() for block in blocks]
    blocks.clear()
    return Divided(_contiguous(jobs), _contiguous(steps), clusters, stand_ins, over)


def _contiguous(frames: list[list[pl.Series]]) -> pl.DataFrame:
    """Join frames, given as their columns from left to right, such that each column is in one piece of memory."""
    for frame in frames:
        frame.reverse()
    return pl.DataFrame([pl.concat([frame.pop() for frame in frames], rechunk=True) for _ in range(len(frames[0]))])


def assemble(records: Divided, *, counting: frozenset[str]) -> tuple[pl.DataFrame, pl.DataFrame, list[Problem]]:
    """Return runs (``JOBS``), steps (``STEPS``), and a problem for each step without a job in the input.

    ``counting`` names the clusters that count GPUs in accounting: those of ``records``, and others known before.
    """
    jobs = _zero_gpus(records.jobs, counting).with_columns(
        pl.coalesce("submit", "eligible", "start", pl.lit(_EPOCH, dtype=TIME)).alias("submit")
    )
    height = jobs.height
    jobs = _without_duplicates(_separate_runs(jobs), JOB_KEY)
    steps, problems = _place(_zero_gpus(records.steps, counting), jobs)
    if jobs.height < height:
        steps = _without_duplicates(steps, STEP_KEY)
    jobs = _fill_from_steps(jobs, steps)
    steps = steps.rename({"job_name": "step_name"})
    return conform(jobs, JOBS), conform(steps, STEPS), problems


def _zero_gpus(frame: pl.DataFrame, counting: frozenset[str]) -> pl.DataFrame:
    """Set missing GPU counts to 0 if the record lists the allocation and the cluster counts GPUs."""
    none = pl.col("gpus").is_null() & pl.col("start").is_not_null() & pl.col("gpus_said").fill_null(value=False)
    if not counting.issuperset(frame["cluster"].unique().to_list()):
        none &= pl.col("cluster").is_in(sorted(counting))
    return frame.with_columns(pl.when(none).then(0).otherwise("gpus").alias("gpus"))


def _separate_runs(jobs: pl.DataFrame) -> pl.DataFrame:
    """Separate successive runs with the same key, as of a requeued job: each is submitted when the one before it ends.

    Slurm sets a new submit time on requeue; other programs that write accounting may not.
    """
    if jobs["job_id"].is_unique().all():
        return jobs
    several = jobs.with_row_index("at").filter(pl.struct(JOB_KEY).is_duplicated() & pl.col("start").is_not_null())
    changed: dict[int, datetime] = {}
    before: tuple[object, ...] = ()
    submit = began = over = None
    for row, *key, start, end in several.sort(*JOB_KEY, "start").select("at", *JOB_KEY, "start", "end").iter_rows():
        if (*key,) != before:
            before, submit, began, over = (*key,), key[-1], start, end
        elif start == began:
            over = end if over is None else over
        elif over is not None and start >= over:
            submit, began, over = over, start, end
        if submit is not None and submit != key[-1]:
            changed[row] = submit
    if not changed:
        return jobs
    submits = jobs["submit"].scatter(list(changed), pl.Series(list(changed.values()), dtype=TIME))
    return jobs.with_columns(submits)


def _without_duplicates(frame: pl.DataFrame, key: tuple[str, ...]) -> pl.DataFrame:
    """Keep one of the records with the same key: prefer one that has ended over a running one, else the last."""
    if frame["job_id"].is_unique().all() or not frame.select(pl.struct(key).is_duplicated().any()).item():
        return frame
    order = frame.sort(pl.col("end").is_not_null(), "line", nulls_last=False, maintain_order=True)
    return order.unique(subset=list(key), keep="last", maintain_order=True).sort("line", maintain_order=True)


def _place(steps: pl.DataFrame, jobs: pl.DataFrame) -> tuple[pl.DataFrame, list[Problem]]:
    """Assign each step to its run by setting ``submit``."""
    if steps.is_empty():
        return steps, []
    several = jobs.group_by(_RUN).len().filter(pl.col("len") > 1).select(_RUN)
    single = jobs if several.is_empty() else jobs.join(several, on=_RUN, how="anti")
    # Job IDs alone are faster to join, and sufficient with one cluster.
    on = ["job_id"] if jobs["cluster"].n_unique() <= 1 and steps["cluster"].n_unique() <= 1 else list(_RUN)
    runs = steps.select(on).join(single.select(*on, run="submit"), on=on, how="left", maintain_order="left")
    steps = steps.with_columns(runs["run"])
    if several.height:
        steps = _place_among(steps, jobs.join(several, on=_RUN, how="semi"))
    lost = steps.filter(pl.col("run").is_null())
    jobs_of_several = set(several.iter_rows()) if lost.height else set()
    problems = [
        Problem(line, printed, None, _AMBIGUOUS_STEP if (cluster, job) in jobs_of_several else _STEP_WITHOUT_JOB)
        for line, printed, cluster, job in lost.select("line", "printed", *_RUN).iter_rows()
    ]
    placed = steps.filter(pl.col("run").is_not_null()) if problems else steps
    return placed.drop("submit").rename({"run": "submit"}), problems


_STEP_WITHOUT_JOB = "a step whose job is not in this input"
_AMBIGUOUS_STEP = "a step that may be of several runs of its job"


def _place_among(steps: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Assign steps of jobs with several runs: to the run printed before, unless the start is only within another one.

    Slurm prints the steps of a run after it. Without such a run, a step that may be of several runs is of none.
    """
    runs_of: dict[tuple[str, int], list[tuple[int, datetime, datetime | None, datetime | None]]] = {}
    for cluster, job, *run in runs.select(*_RUN, "line", "submit", "start", "end").sort("line").iter_rows():
        runs_of.setdefault((cluster, job), []).append((run[0], run[1], run[2], run[3]))
    unassigned = steps.select(pl.int_range(pl.len()).alias("at"), *_RUN, "line", "start", "run").filter(
        pl.col("run").is_null()
    )
    positions: list[int] = []
    starts: list[datetime] = []
    for row, cluster, job, line, start, _ in unassigned.iter_rows():
        candidates = runs_of.get((cluster, job))
        if not candidates:
            continue
        before = [run for run in candidates if run[0] < line]
        within = [run for run in candidates if start is not None and _contains(run, start)]
        chosen = before[-1] if before else None
        if within and chosen not in within:
            chosen = within[0] if len(within) == 1 else None
        if chosen is None:
            continue
        positions.append(row)
        starts.append(chosen[1])
    if not positions:
        return steps
    return steps.with_columns(steps["run"].scatter(positions, pl.Series(starts, dtype=TIME)))


def _contains(run: tuple[int, datetime, datetime | None, datetime | None], moment: datetime) -> bool:
    _, _, start, end = run
    return start is not None and start <= moment and (end is None or moment < end or moment == start)


def _fill_from_steps(jobs: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Fill fields of jobs from their steps: the largest MaxRSS, and GPUs if the record of the job names none."""
    # Grouping by text or by several columns is slow, and job IDs are sufficient if no two runs have the same one.
    on = ["job_id"] if jobs["job_id"].is_unique().all() else list(JOB_KEY)
    largest = _largest(steps.filter(pl.col("max_rss_bytes").is_not_null()), on, "max_rss_bytes")
    without = jobs.filter(pl.col("start").is_not_null() & (pl.col("gpus").fill_null(0) == 0)).select(on)
    with_gpus = steps.filter(pl.col("gpus") > 0).join(without, on=on, how="semi")
    for largest_of_steps, name in ((largest, "max_rss_bytes"), (_largest(with_gpus, on, "gpus"), "gpus")):
        if largest_of_steps.height:
            of_steps = jobs.select(on).join(largest_of_steps, on=on, how="left", maintain_order="left")["of_steps"]
            jobs = jobs.with_columns(pl.max_horizontal(name, of_steps).alias(name))
    return jobs


def _largest(steps: pl.DataFrame, on: list[str], name: str) -> pl.DataFrame:
    return steps.group_by(on).agg(pl.col(name).max().alias("of_steps"))
