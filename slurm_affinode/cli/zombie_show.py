"""Findings and explanations on a terminal: aligned, without a break in a word, from 76 columns on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slurm_affinode.cli.options import clock, printable, zone
from slurm_affinode.core.explanation import Explanation, GpuPage, Slot
from slurm_affinode.core.signature_file import SignatureFile, Tried
from slurm_affinode.core.spans import span
from slurm_affinode.model.finding import (
    KINDS,
    USER_KINDS,
    Evidence,
    Finding,
    GpuEvidence,
    NodeRef,
    ProcessRef,
    QueueImpact,
)
from slurm_affinode.workflow.zombies import Found

NOTHING = "Nothing is held against this job."
BLOCKS = "_▁▂▃▄▅▆▇█"
UNKNOWN = "·"


def console() -> Console:
    """Of standard output; 100 columns where it is no terminal and COLUMNS does not say otherwise."""
    shown = Console(file=sys.stdout, highlight=False)
    if not sys.stdout.isatty() and "COLUMNS" not in shown._environ:
        shown = Console(file=sys.stdout, highlight=False, width=100)
    return shown


def found_json(found: Found) -> dict[str, Any]:
    """For machines."""
    return {
        "source": found.source, "since": found.since, "until": found.until, "jobs": found.jobs, "gpus": found.gpus,
        "unmeasured_gpus": found.unmeasured, "counts": dict(found.counts), "notes": list(found.notes),
        "findings": [one.as_json() for one in found.findings],
    }  # fmt: skip


def print_found(found: Found, *, wide: bool = False, explain: str | None = "") -> None:
    """A row per finding: what, who, since when, how much, and how many jobs wait; with ``wide`` all evidence.

    ``explain``: options with which ``zombies explain`` sees the same; ``None``: there are none.
    """
    out = console()
    jobs, gpus = _several(found.jobs, "GPU job"), _several(found.gpus, "GPU")
    looked = f"{jobs}, {gpus}, {clock(found.since)} to {clock(found.until)} ({zone()})"
    if not found.findings:
        out.print(Text(f"Nothing found: {looked} ({found.source})."))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        names = ("what", "subject", "user", "where", "idle", "GPU-h", "waits", "score")
        rows = [[(printable(cell), style) for cell, style in _row(one)] for one in found.findings]
        widths = _widths(names, [[cell for cell, _ in row] for row in rows], out.width)
        for name, width in zip(names, widths, strict=True):
            right = name in ("idle", "GPU-h", "waits", "score")
            table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis",
                             max_width=width)  # fmt: skip
        room = 0 if wide else out.width - sum(width + 1 for width in widths)
        if room >= WHY_COLUMNS:
            table.add_column("why", no_wrap=True)
            for row, one in zip(rows, found.findings, strict=True):
                text = Text(printable(one.summary), style="dim")
                text.truncate(room, overflow="ellipsis")
                row.append((text.plain, "dim"))
        for row in rows:
            table.add_row(*(Text(cell, style=style) for cell, style in row))
        out.print(table)
        if wide:
            for one in found.findings:
                out.print()
                _print_finding(out, one)
        held = sum(one.held_gpu_hours or 0.0 for one in found.findings)
        out.print()
        out.print(Text(f"{len(found.findings)} found, {held:,.1f} GPU-hours held idle. Looked at {looked}."))
        first = next((one for one in found.findings if one.job is not None and one.kind not in USER_KINDS), None)
        if first is not None and first.job is not None and explain is not None and not wide:
            command = f"slurm-affinode zombies explain {first.job.id}{explain}"
            # Not broken into lines: it is there to be copied.
            out.print(Text(f"Evidence: --wide, or {printable(command)}", style="dim"), soft_wrap=True)
    if found.unmeasured:
        few = "1 GPU was" if found.unmeasured == 1 else f"{found.unmeasured} GPUs were"
        out.print(Text(f"{few} not measured, and accused of nothing.", style="dim"))


WHY_COLUMNS = 24
"""Where so many columns are left there is room for the evidence in short."""
_WIDTHS = {"what": 19, "subject": 14, "user": 12, "where": 14}
_COLOURS = {"squatter": "red", "idle-allocation": "yellow", "orphan-process": "red", "orphan-memory": "red"}


def _widths(names: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> list[int]:
    """Columns that each column of the table takes: what it needs, and no more than its share where that is too much."""
    needed = [max(cell_len(cell) for cell in (name, *(row[i] for row in rows))) for i, name in enumerate(names)]
    widths = [min(most, _WIDTHS.get(name, most)) for name, most in zip(names, needed, strict=True)]
    left = columns - sum(width + 1 for width in widths)
    for i, most in enumerate(needed):
        more = min(max(0, left), most - widths[i])
        widths[i] += more
        left -= more
    return widths


def _row(one: Finding) -> list[tuple[str, str]]:
    what = one.variant if one.kind == "idle-allocation" and one.variant else one.kind
    lasts = one.kind in ("squatter", "idle-allocation", "completing", "orphan-memory") and one.window_s > 0
    idle = span(one.window_s) if lasts else ""
    hours = "" if one.held_gpu_hours is None else f"{one.held_gpu_hours:,.1f}"
    waits = "" if one.impact is None else str(one.impact.jobs)
    return [
        (what, _COLOURS.get(one.kind, "")), (_subject(one), ""), (one.user or "?", ""), (_where(one), ""),
        (idle, ""), (hours, ""), (waits, ""), (f"{one.score:.2f}", ""),
    ]  # fmt: skip


def _subject(one: Finding) -> str:
    match one.subject:
        case ProcessRef(pid=pid):
            return f"pid {pid}"
        case NodeRef(gpu=gpu):
            # Its index, where there is one: a UUID is long.
            return "node" if gpu is None else f"GPU {one.gpus[0].gpu if one.gpus else gpu}"
    if one.kind.endswith("-user"):
        return one.account or ""
    return one.job.id if one.job is not None else ""


def _where(one: Finding) -> str:
    if not one.nodes:
        return one.partition or ""
    flagged, held = len(one.flagged_gpus), one.allocated_gpus
    of = f" {flagged}/{held}" if flagged and held else ""
    more = f"+{len(one.nodes) - 1}" if len(one.nodes) > 1 else ""
    return f"{one.nodes[0]}{more}{of}"


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def evidence_table(rows: Sequence[Evidence]) -> Table:
    """What was seen, what it is held against, what it counts for."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("dimension", no_wrap=True)
    table.add_column("what was seen", ratio=3, overflow="fold")
    table.add_column("held against", ratio=2, overflow="fold")
    table.add_column("weight", justify="right", no_wrap=True)
    for one in rows:
        mark, style = ("?", "dim") if one.unknown else ("✓", "") if one.met else ("–", "dim")
        if one.weight == 0 and not one.unknown:
            mark, style = "i", "dim"
        weight = "" if one.weight == 0 else f"{one.points:.2f}/{one.weight:.2f}"
        seen = f"unknown: {one.text}" if one.unknown else one.text
        cells = (mark, one.dimension, seen, one.threshold or "", weight)
        table.add_row(*(Text(printable(cell), style=style) for cell in cells))
    return table


def impact_text(impact: QueueImpact) -> str:
    """What a finding keeps from others, in a sentence."""
    if not impact.jobs:
        return "No waiting job that fits these GPUs was held up."
    jobs = "1 waiting job fits" if impact.jobs == 1 else f"{impact.jobs} waiting jobs fit"
    names = ", ".join(impact.examples) + (", ..." if impact.jobs > len(impact.examples) else "")
    return (
        f"{jobs} these GPUs ({names}); {impact.startable} could run on them at once. Together they waited "
        f"{span(impact.waited_s)} meanwhile, one of them {span(impact.longest_s)}."
    )


def _print_finding(out: Console, one: Finding) -> None:
    title = Text(
        printable(f"{one.kind}{f' ({one.variant})' if one.variant not in (None, one.kind) else ''}: {KINDS[one.kind]}"),
        style="bold",
    )
    about = f"{_subject(one)} of {one.user or '?'}, {_where(one)}, score {one.score:.2f}"
    if one.kind in USER_KINDS:
        about = f"{one.user or '?'}{f', account {one.account}' if one.account else ''}, score {one.score:.2f}"
    parts: list[Any] = [title, Text(printable(about)), evidence_table(one.evidence)]
    if one.held_gpu_hours is not None:
        memory = "" if one.held_gib_hours is None else f", {one.held_gib_hours:,.0f} GiB-hours of GPU memory"
        parts.append(Text(f"Held and not used: {one.held_gpu_hours:,.1f} GPU-hours{memory}."))
    if one.impact is not None:
        parts.append(Text(printable(impact_text(one.impact))))
    if one.advice:
        parts.append(Text(printable(one.advice)))
    out.print(Group(*parts))


def print_explanation(page: Explanation) -> None:
    """The page of one job."""
    out = console()
    job = page.job
    state = (job.state or "in an unknown state") + (f", ended {clock(job.end)}" if job.end else "")
    name = f" ({job.name})" if job.name else ""
    out.print(Text(printable(f"Job {job.id}{name} of {page.user or '?'}: {state}"), style="bold"))
    limit = "" if job.time_limit_s is None else f" of at most {span(job.time_limit_s)}"
    ran = span((page.until - page.since).total_seconds())
    where = f"{', '.join(page.nodes) or 'nodes not known'}, partition {page.partition or '?'}"
    gpus = _several(page.allocated_gpus or 0, "GPU")
    out.print(Text(printable(f"{gpus} on {where}; looked at {ran}{limit}")))
    if not page.findings:
        out.print()
        out.print(Text(printable(page.answer), style="green" if page.answer == NOTHING else "yellow"))
    for one in page.findings:
        out.print()
        _print_finding(out, one)
    most_w = max((one.power_w for gpu in page.gpus for one in gpu.slots if one.power_w is not None), default=0.0)
    for gpu in page.gpus:
        out.print()
        _print_gpu(out, gpu, most_w)
    if page.gpus:
        out.print()
        first, last = clock(page.since), f"{clock(page.until)} ({zone()})"
        out.print(Text(f"Time line from {first} to {last}; {BLOCKS[0]} is 0, {UNKNOWN} is not measured.", style="dim"))
    for note in page.notes:
        out.print(Text(printable(note), style="dim"))


def _print_gpu(out: Console, page: GpuPage, most_w: float) -> None:
    gpu = page.gpu
    word = "not measured" if not gpu.measured else "idle" if gpu.flagged else "not flagged"
    word += f"; mapping: {gpu.mapping}" if gpu.mapping else ""
    title = f"GPU {gpu.gpu} on {gpu.node or '?'}{f', {gpu.model}' if gpu.model else ''}: {word}"
    out.print(Text(printable(title), style="bold"))
    width = max(20, min(out.width - 22, len(page.slots) or 1))
    for label, line, right in lines_of(gpu, page.slots, width, most_w):
        out.print(Text(f"  {label:<9}{line}  {right}"), no_wrap=True, overflow="ellipsis")
    fits = [f"fits {name}" for name in page.fits]
    for text in fits or [f"not {names}: {why}" for names, why in page.why_not]:
        out.print(Padding(Text(printable(text), style="" if fits else "dim"), (0, 0, 0, 2)))


def lines_of(gpu: GpuEvidence, slots: Sequence[Slot], width: int, most_w: float) -> list[tuple[str, str, str]]:
    """Label, blocks, and the figure at the right."""
    total = gpu.total_gib or max((one.memory_gib for one in slots if one.memory_gib is not None), default=0.0)
    mean = "unknown" if gpu.activity_pct is None else f"{gpu.activity_pct:.0f} %"
    held = "unknown" if gpu.held_gib is None else f"{gpu.held_gib:.1f} GiB"
    watts = [one.power_w for one in slots if one.power_w is not None]
    mean_w = gpu.power_w if gpu.power_w is not None else sum(watts) / len(watts) if watts else None
    power = "unknown" if mean_w is None else f"{mean_w:.0f} W"
    return [
        ("activity", blocks([one.activity_pct for one in slots], 100.0, width), mean),
        ("memory", blocks([one.memory_gib for one in slots], total, width), held),
        ("power", blocks([one.power_w for one in slots], most_w, width), power),
    ]


def blocks(values: Sequence[float | None], most: float, width: int) -> str:
    """A line of blocks; several values in one column show their largest. Anything above 0 shows a block."""
    shown = []
    count = min(width, len(values))
    for column in range(count):
        part = values[column * len(values) // count : max((column + 1) * len(values) // count, 1)]
        known = [one for one in part if one is not None]
        if not known:
            shown.append(UNKNOWN)
            continue
        share = 0.0 if most <= 0 else min(1.0, max(known) / most)
        shown.append(BLOCKS[0 if share <= 0 else max(1, round(share * (len(BLOCKS) - 1)))])
    return "".join(shown)


def print_signatures(where: Path, file: SignatureFile) -> None:
    """What is in a file that is right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("signature", "kind", "window", "min score", "examples", "line"):
        table.add_column(name, justify="left" if name in ("signature", "kind") else "right", no_wrap=True)
    for one in file.signatures:
        count = sum(example.signature == one.name for example in file.examples)
        table.add_row(one.name, one.kind, span(one.time.longer_than_s), f"{one.min_score:g}", str(count), str(one.line))
    out = console()
    out.print(Text(printable(f"{where}: {_several(len(file.signatures), 'signature')}, nothing wrong.")))
    out.print(table)


def print_tried(where: Path, tried: Sequence[Tried]) -> None:
    """How each example was judged."""
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("signature", no_wrap=True)
    table.add_column("example", ratio=3, overflow="fold")
    table.add_column("judged", ratio=3, overflow="fold")
    for one in tried:
        judged = "fits" if one.verdict.fits else one.verdict.why_not
        cells = ("✓" if one.ok else "✗", one.example.signature, one.example.says, judged)
        table.add_row(*(Text(printable(cell), style="" if one.ok else "red") for cell in cells))
    out.print(table)
    wrong = [one for one in tried if not one.ok]
    for one in wrong:
        expected = "fit" if one.example.fits else "not fit"
        out.print(Text(printable(f"{where}:{one.example.line}: should {expected}: {one.example.says}")))
    out.print(Text(f"{len(tried) - len(wrong)} of {len(tried)} examples are judged as they say."))
