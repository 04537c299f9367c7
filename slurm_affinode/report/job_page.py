"""The page of ``job --html``: one file in the style of the reports. All names are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo

from markupsafe import Markup

from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.base.text import visible
from slurm_affinode.model.finding import KINDS
from slurm_affinode.model.job_summary import USES, GpuUse, JobSummary, JobSuspension, ResourceUse
from slurm_affinode.report import charts, job_text
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, legend_list
from slurm_affinode.report.context import Cell, Column, Table
from slurm_affinode.report.measures import STATES
from slurm_affinode.report.render import page as render_page

_LEAST_HEIGHT = 0.08
"""Height of a slot with little activity, so that it is visible."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """Context of ``job.html.j2``."""

    lead: str
    allocation: str
    times: str
    attempts: str
    verdict: str
    admin_comment: str
    advice: tuple[str, ...]
    uses: Table
    gpus: Table | None
    gpus_lead: str
    legend: Markup
    windows: Table | None
    suspensions: Table | None
    findings: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def render(summary: JobSummary, zone: tzinfo, thresholds: Thresholds) -> str:
    """Return the HTML of a summary; ``thresholds`` color the activity of the GPUs."""
    job = summary.job
    name = f" ({job.name})" if job.name else ""
    account = f", account {summary.account}" if summary.account else ""
    state = job.state or "in an unknown state"
    where = f"partition {summary.partition or 'unknown'}" + (f", QOS {summary.qos}" if summary.qos else "")
    lead = f"{summary.user or 'unknown user'}{account}: {state}; {summary.cluster}, {where}; "
    end = "still running" if job.end is None else f"ended {fmt.moment(job.end, zone)}"
    context = JobContext(
        lead=visible(lead + job_text.nodes(summary.nodes)),
        allocation=visible(job_text.allocation(summary)),
        times=f"Started {fmt.moment(job.start, zone)}, {end}",
        attempts=job_text.attempts(summary),
        verdict=summary.verdict,
        admin_comment=job_text.admin_comment(summary),
        advice=tuple(visible(job_text.advice(each)) for each in summary.advice),
        uses=_uses(summary.uses),
        gpus=_gpus(summary, thresholds) if summary.gpus else None,
        gpus_lead=f"Activity of the busiest signal, 0 to 100 %, in steps of {fmt.duration(summary.slot_s)}.",
        legend=legend_list([Series(label, [], key) for key, label in STATES]),
        windows=_windows(summary, zone) if summary.idle_windows else None,
        suspensions=_suspensions(summary, zone) if summary.suspensions else None,
        findings=tuple((KINDS.get(each.kind, each.kind), visible(each.text)) for each in summary.findings),
        notes=tuple(map(visible, (*summary.notes, *job_text.origin(summary, lambda moment: fmt.moment(moment, zone))))),
    )
    return render_page("job.html.j2", title=f"Job {job.id}{name}", zone=zone, generated=summary.generated, j=context)


def _uses(uses: Sequence[ResourceUse]) -> Table:
    columns = (Column("Resource", unit="amount"), Column("Used", "picture"), Column("Share", "number"))
    return Table("uses", "Use of the allocation", columns, tuple(map(_use, uses)), sortable=False, bare=True)


def _use(use: ResourceUse) -> tuple[Cell, ...]:
    label = USES[use.key]
    label = label[:1].upper() + label[1:]
    heading = Cell(label, "text", sub=job_text.amount(use).removeprefix("unknown: "))
    if use.share is None:
        bar = charts.meter(f"{label}: unknown", [(1.0, "unknown")], 1.0)
        return heading, Cell(picture=bar, kind="picture"), Cell(fmt.UNKNOWN, "number unknown")
    share = min(1.0, use.share)
    parts = [(share, "1" if use.key == "time_limit" else "busy"), (1 - share, "free")]
    bar = charts.meter(f"{label}: {fmt.percent(use.share)}", parts, 1.0)
    return heading, Cell(picture=bar, kind="picture"), Cell(fmt.percent(use.share), "number")


def _gpus(summary: JobSummary, thresholds: Thresholds) -> Table:
    columns = (
        Column("GPU", unit="model"), Column("Activity", "picture"), Column("Utilization", "number", "mean"),
        Column("Idle", "number", "in all"), Column("Longest", "number", "idle window"),
        Column("Memory", "number", "peak, GiB"),
    )  # fmt: skip
    rows = tuple(_gpu(gpu, thresholds) for gpu in summary.gpus)
    return Table("gpu-table", "GPUs over time", columns, rows, sortable=False, bare=True)


def _gpu(gpu: GpuUse, thresholds: Thresholds) -> tuple[Cell, ...]:
    label = f"{gpu.name}: {fmt.duration(gpu.idle_s)} idle" if gpu.measured_s > 0 else f"{gpu.name}: not measured"
    strip = charts.strip(visible(label), [_slot(pct, thresholds) for pct in gpu.activity_pct])
    peak = None if gpu.shared else gpu.memory_peak_gib
    memory = fmt.number(peak)
    if peak is not None and gpu.memory_total_gib is not None:
        memory += f" of {fmt.number(gpu.memory_total_gib)}"
    is_known = gpu.measured_s > 0
    return (
        Cell(visible(gpu.name), "text", sub=fmt.name(gpu.model), name=True),
        Cell(picture=strip, kind="picture"),
        _number(gpu.utilization_pct, fmt.pct(gpu.utilization_pct)),
        _number(gpu.idle_s if is_known else None, fmt.duration(gpu.idle_s)),
        _number(gpu.longest_idle_s, fmt.duration(gpu.longest_idle_s)),
        _number(peak, memory),
    )


def _slot(pct: float | None, thresholds: Thresholds) -> list[tuple[float, str]]:
    if pct is None:
        return [(1.0, "unknown")]
    fill = "idle" if pct <= thresholds.idle_pct else "low" if pct <= thresholds.low_pct else "busy"
    return [(max(_LEAST_HEIGHT, min(1.0, pct / 100)), fill)]


def _number(value: float | None, text: str) -> Cell:
    return Cell(fmt.UNKNOWN, "number unknown") if value is None else Cell(text, "number")


def _windows(summary: JobSummary, zone: tzinfo) -> Table:
    columns = (Column("Idle for", unit="GPUs"), Column("From", "short"), Column("To", "short"))
    rows = tuple(
        (Cell(fmt.duration(window.length_s), "text", sub=visible(job_text.idle_gpus(window, summary))),
         Cell(fmt.moment(window.start, zone), "short"), Cell(fmt.moment(window.end, zone), "short"))
        for window in summary.idle_windows
    )  # fmt: skip
    return Table("window-table", "Longest idle windows", columns, rows, sortable=False, bare=True)


def _suspensions(summary: JobSummary, zone: tzinfo) -> Table:
    columns = (Column("Began", "short"), Column("Outcome", unit="node"), Column("Asleep", "number"),
               Column("Given back", "number", "GPU-h"))  # fmt: skip
    rows = tuple(
        (Cell(fmt.moment(suspension.began, zone), "short"),
         Cell(suspension.outcome, "text", sub=visible(suspension.failure or _places(suspension))),
         _number(suspension.asleep_s, fmt.duration(suspension.asleep_s)),
         _number(suspension.gpu_hours, fmt.number(suspension.gpu_hours)))
        for suspension in summary.suspensions
    )  # fmt: skip
    return Table("suspension-table", "Suspensions", columns, rows, sortable=False, bare=True)


def _places(suspension: JobSuspension) -> str:
    return " to ".join(name for name in (suspension.node, suspension.restored_node) if name is not None)
