"""The page of ``zombies explain --html``: one file in the style of the reports. All names are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import time, timedelta, tzinfo

from markupsafe import Markup

from slurm_affinode.base.text import span, visible
from slurm_affinode.core.explanation import Explanation, GpuPage, Slot
from slurm_affinode.model.finding import KINDS, Evidence, Finding, without_repeated_hours
from slurm_affinode.report import charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import time_ticks
from slurm_affinode.report.context import Card
from slurm_affinode.report.render import page as render_page

IDLE_PCT = 5.0
HEIGHT = 72


@dataclass(frozen=True, slots=True)
class EvidenceRow:
    """A row of evidence."""

    mark: str
    dimension: str
    value: str
    threshold: str
    weight: str
    unknown: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """A finding, formatted."""

    title: str
    meaning: str
    lines: tuple[EvidenceRow, ...]
    impact: str
    advice: str


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A GPU, formatted."""

    title: str
    word: str
    charts: tuple[Markup, ...]
    verdicts: tuple[str, ...]


def render(page: Explanation, zone: tzinfo) -> str:
    """Return the HTML of an explanation."""
    job = page.job
    state = (job.state or "in an unknown state") + (f", ended {fmt.moment(job.end, zone)}" if job.end else "")
    name = f" ({visible(job.name)})" if job.name else ""
    lead = f"{visible(page.user or 'unknown user')}, {state}; partition {visible(page.partition or 'unknown')}"
    lead += f"; {', '.join(page.nodes) or 'nodes not known'}"
    most_w = max((slot.power_w for gpu in page.gpus for slot in gpu.slots if slot.power_w is not None), default=0.0)
    return render_page(
        "zombie.html.j2",
        title=f"Job {job.id}{name}",
        lead=lead,
        answer=page.answer,
        cards=_cards(page),
        findings=[_shown(finding) for finding in page.findings],
        gpus=[_gpu(gpu, number, most_w, zone) for number, gpu in enumerate(page.gpus)],
        notes=[visible(note) for note in page.notes],
        span=f"{fmt.moment(page.since, zone)} to {fmt.moment(page.until, zone)}",
        zone=zone,
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cards(page: Explanation) -> list[Card]:
    counted = without_repeated_hours(page.findings)
    held_hours = sum(finding.held_gpu_hours or 0.0 for finding in counted)
    gib = [finding.held_gib_hours for finding in counted if finding.held_gib_hours is not None]
    idle = [finding for finding in page.findings if finding.held_gpu_hours is not None]
    waited = [finding.impact for finding in page.findings if finding.impact is not None]
    limit = page.job.time_limit_s
    measured = sum(gpu.gpu.measured for gpu in page.gpus)
    return [
        Card("GPUs", str(page.allocated_gpus or len(page.gpus)), sub=f"{measured} measured"),
        Card("Looked at", span((page.until - page.since).total_seconds()),
             sub="" if limit is None else f"of at most {span(limit)}"),
        Card("Idle until the end", span(max((finding.window_s for finding in idle), default=0.0)), kind="idle"),
        Card("Held and not used", fmt.number(held_hours), "GPU h",
             sub=f"{fmt.number(sum(gib))} GiB h of GPU memory" if gib else "GPU memory not known"),
        Card("Jobs that waited meanwhile",
             str(max((impact.jobs for impact in waited), default=0)) if waited else "unknown", unknown=not waited),
    ]  # fmt: skip


def _shown(finding: Finding) -> Shown:
    impact = ""
    if finding.impact is not None and finding.impact.jobs:
        impact = (
            f"{finding.impact.jobs} waiting jobs would fit on these GPUs, {finding.impact.startable} of them at once. "
            f"Together they waited {span(finding.impact.waited_s)} meanwhile, "
            f"one of them {span(finding.impact.longest_s)}."
            if finding.impact.jobs > 1
            else f"1 waiting job would fit on these GPUs. It waited {span(finding.impact.waited_s)} meanwhile."
        )
    elif finding.impact is not None:
        impact = "No waiting job that fits these GPUs was held up."
    title = finding.kind + (f" ({finding.variant})" if finding.variant not in (None, finding.kind) else "")
    lines = tuple(_line(row) for row in finding.evidence)
    return Shown(
        title, f"{_sentence(KINDS[finding.kind])}. Score {finding.score:.2f} of 1.", lines, impact, finding.advice
    )


def _line(row: Evidence) -> EvidenceRow:
    mark = "unknown" if row.unknown else "yes" if row.met else "shown" if row.weight == 0 else "no"
    weight = "" if row.weight == 0 else f"{row.points:.2f} of {row.weight:.2f}"
    return EvidenceRow(mark, row.dimension, visible(row.text), row.threshold or "", weight, row.unknown)


def _gpu(page: GpuPage, number: int, most_w: float, zone: tzinfo) -> GpuRow:
    gpu = page.gpu
    title = f"GPU {gpu.gpu} on {gpu.node or 'an unknown node'}" + (f", {gpu.model}" if gpu.model else "")
    word = "not measured" if not gpu.measured else "idle" if gpu.flagged else "not flagged"
    word += f"; mapping: {gpu.mapping}" if gpu.mapping else ""
    total = gpu.total_gib or max((slot.memory_gib for slot in page.slots if slot.memory_gib is not None), default=0.0)
    charts = (
        _bars(f"activity-{number}", "Activity, % of the busiest signal", page.slots,
              [slot.activity_pct for slot in page.slots], 100.0, "%", zone),
        _bars(f"memory-{number}", f"GPU memory held, of {total:.1f} GiB", page.slots,
              [slot.memory_gib for slot in page.slots], total, "GiB", zone),
        _bars(f"power-{number}", "Power", page.slots, [slot.power_w for slot in page.slots], most_w, "W", zone),
    )  # fmt: skip
    fits = [f"Fits {name}." for name in page.fits]
    against = [f"Does not fit {names}: {why}." for names, why in page.why_not]
    return GpuRow(visible(title), word, charts, tuple(fits or against))


def _bars(  # noqa: PLR0917
    key: str, title: str, slots: Sequence[Slot], values: Sequence[float | None], most: float, unit: str, zone: tzinfo
) -> Markup:
    measured_values = [measured for measured in values if measured is not None]
    if not measured_values:
        return charts.empty(charts.Words(key, title, "Not measured."), "Not measured.")
    each = 100 / len(values)
    rects = []
    for number, value in enumerate(values):
        if value is None:
            rects.append(_rect(number * each, each, 0.0, HEIGHT, "unknown"))
            continue
        fill = "1" if unit != "%" else "idle" if value <= IDLE_PCT else "busy"
        high = 2.0 if most <= 0 else max(2.0, min(1.0, value / most) * HEIGHT)
        rects.append(_rect(number * each, each, HEIGHT - high, high, fill))
    mean = sum(measured_values) / len(measured_values)
    summary = f"{title}: mean {mean:.1f} {unit}, largest {max(measured_values):.1f} {unit}."
    svg = Markup('<svg class="strip" width="100%" height="{}" role="img" aria-label="{}">{}</svg>').format(
        HEIGHT, summary, Markup("").join(rects)
    ) + _times(slots, zone)
    numbers = charts.Numbers(
        ("from", unit),
        [(fmt.moment(slot.start, zone), "unknown" if value is None else f"{value:.1f}")
         for slot, value in zip(slots, values, strict=True)],
        title,
    )  # fmt: skip
    colours = (
        " Idle and busy time have different colors; gray: not measured." if unit == "%" else " Gray: not measured."
    )
    return charts.figure(charts.Words(key, title, summary), svg, numbers=numbers, note=summary + colours)


def _times(slots: Sequence[Slot], zone: tzinfo) -> Markup:
    """Return the time axis below a strip; a third of the page has room for four labels."""
    first, count = slots[0].start, len(slots)
    step = slots[1].start - first if count > 1 else timedelta(minutes=1)
    all_ticks = time_ticks(first, first + step * count, zone)
    days = [mark for mark in all_ticks if mark.time.astimezone(zone).time() == time.min]
    ticks = days[:: -(-len(days) // 4)] if len(days) > 1 else [mark for mark in all_ticks if mark.major]
    texts = []
    for tick in ticks:
        x = 100 * (tick.time - first) / (step * count)
        place = "start" if x < 8 else "end" if x > 92 else "middle"
        texts.append(Markup('<text class="{}" x="{:.2f}%" y="14">{}</text>').format(place, x, tick.label))
    return Markup('<svg class="times" width="100%" height="18" aria-hidden="true">{}</svg>').format(
        Markup("").join(texts)
    )


def _rect(x: float, width: float, y: float, height: float, fill: str) -> Markup:
    text = '<rect class="f-{}" x="{:.3f}%" y="{:.1f}" width="{:.3f}%" height="{:.1f}"/>'
    return Markup(text).format(fill, x, y, width * 0.92, height)  # noqa: S704 - our own text
