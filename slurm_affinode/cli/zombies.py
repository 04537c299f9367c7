"""``slurm-affinode zombies``: list, explain, signatures. Tables fit a terminal of 76 columns."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, NoStoreError, UnreachableError
from slurm_affinode.base.files import delivering
from slurm_affinode.base.garbage import without_collection
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.text import counted, printable, span
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.cli.command import command, group
from slurm_affinode.cli.folding import spreading
from slurm_affinode.cli.line_table import LineColumn, LineTable, fitted, remainder
from slurm_affinode.cli.options import (
    NumberInRange,
    Span,
    When,
    clock,
    config_options,
    dask_option,
    echo,
    json_option,
    left_out_note,
    print_json,
    prometheus_options,
    slurm_options,
    stages,
    warn,
    zone,
)
from slurm_affinode.cli.sparkline import BLOCKS, UNKNOWN, blocks, console
from slurm_affinode.core import signatures as signature_files
from slurm_affinode.core.explanation import ASLEEP, Explanation, GpuPage, Slot
from slurm_affinode.core.signatures import SignatureFile, Tried
from slurm_affinode.model.finding import (
    KINDS,
    USER_KINDS,
    VARIANTS,
    Evidence,
    Finding,
    GpuEvidence,
    NodeRef,
    ProcessRef,
    QueueImpact,
    without_repeated_hours,
)
from slurm_affinode.slurm.client import open_client
from slurm_affinode.zombies import explain as explanations
from slurm_affinode.zombies import find
from slurm_affinode.zombies import live as live_findings
from slurm_affinode.zombies.audit import record_listing
from slurm_affinode.zombies.find import Assessment
from slurm_affinode.zombies.nodes import asker
from slurm_affinode.zombies.sampling import NodeSampler

NO_FINDINGS = "There are no findings for this job."


def assessment_json(assessment: Assessment) -> dict[str, Any]:
    """Return the findings for JSON output."""
    return {
        "source": assessment.source, "since": assessment.since, "until": assessment.until,
        "jobs": assessment.jobs, "gpus": assessment.gpus, "unmeasured_gpus": assessment.unmeasured,
        "counts": dict(assessment.counts), "notes": list(assessment.notes),
        "findings": [finding.as_json() for finding in assessment.findings],
    }  # fmt: skip


@without_collection()
def print_assessment(assessment: Assessment, *, wide: bool = False, explain: str | None = "") -> None:
    """Print a table with a row per finding.

    ``wide``: with a summary of the evidence on a terminal of any width, and all evidence below.
    ``explain``: options with which ``zombies explain`` uses the same data; ``None``: there are none.
    """
    out = console()
    jobs, gpus = counted(assessment.jobs, "GPU job"), counted(assessment.gpus, "GPU")
    looked = f"{jobs}, {gpus}, {clock(assessment.since)} to {clock(assessment.until)} ({zone()})"
    if not assessment.findings:
        out.print(Text(printable(f"Nothing found: {looked} ({assessment.source}).")))
    else:
        columns = _columns(assessment.findings, _UNLIMITED if wide else out.width)
        (Console(file=out.file, highlight=False, width=_UNLIMITED) if wide else out).print(LineTable(columns))
        if missing := [name for name in MINOR if name not in {column.name for column in columns}]:
            out.print(Text(left_out_note(out.width, missing, "--wide")))
        if wide:
            for finding in assessment.findings:
                out.print()
                _print_finding(out, finding)
        held_hours = sum(finding.held_gpu_hours or 0.0 for finding in without_repeated_hours(assessment.findings))
        out.print()
        out.print(Text(f"{len(assessment.findings)} found, {held_hours:,.1f} GPU-hours held idle. Examined: {looked}."))
        first = next(
            (finding for finding in assessment.findings if finding.job is not None and finding.kind not in USER_KINDS),
            None,
        )
        if first is not None and first.job is not None and explain is not None and not wide:
            command = f"slurm-affinode zombies explain {first.job.id}{explain}"
            # Not wrapped, so that it can be copied.
            out.print(Text(f"Evidence: --wide, or {printable(command)}", style="dim"), soft_wrap=True)
    if assessment.unmeasured:
        few = "1 GPU was" if assessment.unmeasured == 1 else f"{assessment.unmeasured} GPUs were"
        out.print(Text(f"{few} not measured, so not listed.", style="dim"))


_UNLIMITED = 10_000
"""Characters of a line that is not cut."""
WHY_COLUMNS = 24
"""Minimum free width for a column with a summary of the evidence."""
_WIDTHS = {"what": (15, 19), "subject": (10, 14), "user": (8, 12), "where": (8, 14)}
"""Columns of text -> width to which they are cut, and the usual one, on a terminal with little space."""
MINOR = ("waits", "where", "idle", "user")
"""Columns in the order in which a narrow terminal leaves them out."""
_COLOURS = {"squatter": "red", "idle-allocation": "yellow", "orphan-process": "red", "orphan-memory": "red",
            "orphaned-engine": "red"}  # fmt: skip


_LASTING = frozenset({"squatter", "idle-allocation", "completing", "orphan-memory", "orphaned-engine", "model-server"})
"""Kinds whose window is the time for which they have lasted."""


def _columns(findings: Sequence[Finding], space: int) -> list[LineColumn]:
    """Return the columns of the table in ``space`` characters, with a summary of the evidence if there is room."""
    cells = {
        "what": [_what(finding) for finding in findings],
        "subject": [_subject(finding) for finding in findings],
        "user": [finding.user or "?" for finding in findings],
        "where": [_nodes_of(finding) for finding in findings],
        "idle": [
            span(finding.window_s) if finding.kind in _LASTING and finding.window_s > 0 else "" for finding in findings
        ],
        "GPU-h": ["" if (hours := finding.held_gpu_hours) is None else f"{hours:,.1f}" for finding in findings],
        "waits": ["" if finding.impact is None else str(finding.impact.jobs) for finding in findings],
        "score": [f"{finding.score:.2f}" for finding in findings],
    }
    styles = {"what": [_COLOURS.get(finding.kind, "") for finding in findings]}
    columns = [
        LineColumn(name, [*map(printable, texts)], styles.get(name, ""), name not in _WIDTHS, *_WIDTHS.get(name, ()))
        for name, texts in cells.items()
    ]
    columns = fitted(columns, space, MINOR)
    room = space - sum(column.width + 1 for column in columns)
    if room >= WHY_COLUMNS:
        columns.append(remainder("why", [printable(finding.summary) for finding in findings], "dim", room))
    return columns


def _what(finding: Finding) -> str:
    if finding.kind in ("idle-allocation", "model-server") and finding.variant:
        return finding.variant
    return finding.kind


def _subject(finding: Finding) -> str:
    match finding.subject:
        case ProcessRef(pid=pid):
            return f"pid {pid}"
        case NodeRef(gpu=gpu):
            # Prefer the index to the UUID, which is long.
            return "node" if gpu is None else f"GPU {finding.gpus[0].gpu if finding.gpus else gpu}"
    if finding.kind.endswith("-user"):
        return finding.account or ""
    return finding.job.id if finding.job is not None else ""


def _nodes_of(finding: Finding) -> str:
    if not finding.nodes:
        return finding.partition or ""
    flagged, gpu_count = len(finding.flagged_gpus), finding.allocated_gpus
    of = f" {flagged}/{gpu_count}" if flagged and gpu_count else ""
    more = f"+{len(finding.nodes) - 1}" if len(finding.nodes) > 1 else ""
    return f"{finding.nodes[0]}{more}{of}"


def evidence_table(rows: Sequence[Evidence]) -> Table:
    """Return a table of the evidence: measured values, thresholds and weights."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("dimension", no_wrap=True)
    table.add_column("evidence", ratio=3, overflow="fold")
    table.add_column("threshold", ratio=2, overflow="fold")
    table.add_column("weight", justify="right", no_wrap=True)
    for row in rows:
        mark, style = ("?", "dim") if row.unknown else ("✓", "") if row.met else ("–", "dim")
        if row.weight == 0 and not row.unknown:
            mark, style = "i", "dim"
        weight = "" if row.weight == 0 else f"{row.points:.2f}/{row.weight:.2f}"
        value_text = f"unknown: {row.text}" if row.unknown else row.text
        cells = (mark, row.dimension, value_text, row.threshold or "", weight)
        table.add_row(*(Text(printable(cell), style=style) for cell in cells))
    return table


def impact_text(impact: QueueImpact) -> str:
    """Describe the impact of a finding on waiting jobs."""
    if not impact.jobs:
        return "No waiting job that fits these GPUs was held up."
    jobs = "1 waiting job fits" if impact.jobs == 1 else f"{impact.jobs} waiting jobs fit"
    names = ", ".join(impact.examples) + (", ..." if impact.jobs > len(impact.examples) else "")
    return (
        f"{jobs} these GPUs ({names}); {impact.startable} could run on them at once. Together they waited "
        f"{span(impact.waited_s)} meanwhile, one of them {span(impact.longest_s)}."
    )


def _print_finding(out: Console, finding: Finding) -> None:
    variant = f" ({finding.variant})" if finding.variant not in (None, finding.kind) else ""
    title = Text(printable(f"{finding.kind}{variant}: {KINDS[finding.kind]}"), style="bold")
    about = f"{_subject(finding)} of {finding.user or '?'}, {_nodes_of(finding)}, score {finding.score:.2f}"
    if finding.kind in USER_KINDS:
        account = f", account {finding.account}" if finding.account else ""
        about = f"{finding.user or '?'}{account}, score {finding.score:.2f}"
    parts: list[Any] = [title, Text(printable(about)), evidence_table(finding.evidence)]
    amounts = [] if finding.held_gpu_hours is None else [f"{finding.held_gpu_hours:,.1f} GPU-hours"]
    amounts += [] if finding.held_gib_hours is None else [f"{finding.held_gib_hours:,.1f} GiB-hours of GPU memory"]
    if amounts:
        parts.append(Text(f"Held and not used: {', '.join(amounts)}."))
    if finding.impact is not None:
        parts.append(Text(printable(impact_text(finding.impact))))
    if finding.advice:
        parts.append(Text(printable(finding.advice)))
    out.print(Group(*parts))


def print_explanation(page: Explanation) -> None:
    """Print the explanation of one job."""
    out = console()
    job = page.job
    state = (job.state or "in an unknown state") + (f", ended {clock(job.end)}" if job.end else "")
    name = f" ({job.name})" if job.name else ""
    out.print(Text(printable(f"Job {job.id}{name} of {page.user or '?'}: {state}"), style="bold"))
    limit = "" if job.time_limit_s is None else f" of at most {span(job.time_limit_s)}"
    ran = span((page.until - page.since).total_seconds())
    where = f"{', '.join(page.nodes) or 'nodes not known'}, partition {page.partition or '?'}"
    gpus = counted(page.allocated_gpus or 0, "GPU")
    out.print(Text(printable(f"{gpus} on {where}; examined: {ran}{limit}")))
    if page.findings and page.asleep:
        out.print(Text(ASLEEP, style="yellow"))
    if not page.findings:
        out.print()
        out.print(Text(printable(page.answer), style="green" if page.answer == NO_FINDINGS else "yellow"))
    for finding in page.findings:
        out.print()
        _print_finding(out, finding)
    most_w = max((slot.power_w for gpu in page.gpus for slot in gpu.slots if slot.power_w is not None), default=0.0)
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
    """Return label, block characters and value for activity, memory and power."""
    total = gpu.total_gib or max((slot.memory_gib for slot in slots if slot.memory_gib is not None), default=0.0)
    mean = "unknown" if gpu.activity_pct is None else f"{gpu.activity_pct:.0f} %"
    memory_text = "unknown" if gpu.held_gib is None else f"{gpu.held_gib:.1f} GiB"
    watts = [slot.power_w for slot in slots if slot.power_w is not None]
    mean_w = gpu.power_w if gpu.power_w is not None else sum(watts) / len(watts) if watts else None
    power = "unknown" if mean_w is None else f"{mean_w:.0f} W"
    return [
        ("activity", blocks([slot.activity_pct for slot in slots], 100.0, width), mean),
        ("memory", blocks([slot.memory_gib for slot in slots], total, width), memory_text),
        ("power", blocks([slot.power_w for slot in slots], most_w, width), power),
    ]


def print_signatures(where: Path, file: SignatureFile) -> None:
    """Print the signatures of a valid file."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("signature", "kind", "window", "min score", "examples", "line"):
        table.add_column(name, justify="left" if name in ("signature", "kind") else "right", no_wrap=True)
    for signature in file.signatures:
        count = sum(example.signature == signature.name for example in file.examples)
        title, window = Text(printable(signature.name)), span(signature.time.longer_than_s)
        table.add_row(title, signature.kind, window, f"{signature.min_score:g}", str(count), str(signature.line))
    out = console()
    out.print(Text(printable(f"{where}: {counted(len(file.signatures), 'signature')}, nothing wrong.")))
    out.print(table)


def print_tried(where: Path, tried: Sequence[Tried]) -> None:
    """Print the verdict on each example."""
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("signature", no_wrap=True)
    table.add_column("example", ratio=3, overflow="fold")
    table.add_column("judged", ratio=3, overflow="fold")
    for trial in tried:
        judged = "fits" if trial.verdict.fits else trial.verdict.why_not
        cells = ("✓" if trial.ok else "✗", trial.example.signature, trial.example.claim, judged)
        table.add_row(*(Text(printable(cell), style="" if trial.ok else "red") for cell in cells))
    out.print(table)
    wrong = [trial for trial in tried if not trial.ok]
    for trial in wrong:
        expected = "fit" if trial.example.fits else "not fit"
        out.print(Text(printable(f"{where}:{trial.example.line}: should {expected}: {trial.example.claim}")))
    out.print(Text(f"{len(tried) - len(wrong)} of {len(tried)} examples have the expected outcome."))


_LIST_EPILOG = """\b
Examples:
  slurm-affinode zombies list                          from stored metrics, up to their end
  slurm-affinode zombies list --live                   live: from Slurm, exporters and agents
  slurm-affinode zombies list --kind squatter --partition gpu --window 30m
  slurm-affinode zombies list --since 7d --kind low-efficiency-user
  slurm-affinode zombies list --json | jq -r '.findings[] | select(.kind == "squatter").subject.id'

\b
Exit status: 0 no findings, 1 findings, 2 unusable input, 3 a required service does not respond.
"""
_EXPLAIN_EPILOG = """\b
Examples:
  slurm-affinode zombies explain 123                   every GPU, every dimension, time line
  slurm-affinode zombies explain 123_4 --html page.html
  slurm-affinode zombies explain 123 --live            live; also for its owner, without a database
  slurm-affinode zombies explain 123 --live --watch 1h --html page.html

\b
--live is the default if the site's database is unreadable or does not contain the job. The idle time requires
--watch, --prometheus or stored metrics that are up to date: a single sample only shows the present.
"""


def filters(function: Any) -> Any:
    """Add the options that filter findings."""
    options = [
        click.option("--cluster", "clusters", multiple=True, metavar="NAME", help="Select a cluster; may be repeated"),
        click.option("--partition", "-p", "partitions", multiple=True, metavar="NAME", help="Select a partition"),
        click.option("--account", "-A", "accounts", multiple=True, metavar="NAME", help="Select an account"),
        click.option("--user", "-u", "users", multiple=True, metavar="NAME", help="Select a user"),
        click.option("--node", "-w", "nodes", multiple=True, metavar="NAME", help="Select a node"),
        click.option("--kind", "-k", "kinds", multiple=True, type=click.Choice([*KINDS, *VARIANTS]), metavar="KIND",
                     help=f"Select a kind: {', '.join(KINDS)}; or a variant: {', '.join(VARIANTS)}"),
        click.option("--min-score", type=NumberInRange(0, 1), default=0.0, metavar="SCORE",
                     help="Select findings with at least this score, 0-1"),
        click.option("--window", "window_s", type=Span(), metavar="SPAN",
                     help="Require this idle time instead of the windows of the signatures"),
    ]  # fmt: skip
    return functools.reduce(lambda command, option: option(command), reversed(options), function)


@command("list", epilog=_LIST_EPILOG)
@config_options
@slurm_options
@prometheus_options
@filters
@click.option("--running", is_flag=True, help="Select running jobs")
@click.option("--live", is_flag=True, help="Query the live Slurm, exporters and agents")
@click.option("--watch", "watch_s", type=Span(), metavar="SPAN",
              help="Sample exporters for SPAN if no agent knows the idle time (with --live)")  # fmt: skip
@click.option("--since", type=When(), metavar="TIME", help="Begin at TIME [default: 2d before the end]")
@click.option("--until", type=When(), metavar="TIME", help="End before TIME [default: end of the stored samples]")
@click.option(
    "--clustercockpit",
    "cockpit",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Use averages from ClusterCockpit's job database",
)
@click.option("--wide", is_flag=True, help="Show all evidence in the table")
@dask_option
@json_option
def list_(
    *,
    config: Config,
    clusters: tuple[str, ...],
    partitions: tuple[str, ...],
    accounts: tuple[str, ...],
    users: tuple[str, ...],
    nodes: tuple[str, ...],
    kinds: tuple[str, ...],
    min_score: float,
    window_s: float | None,
    running: bool,
    live: bool,
    watch_s: float | None,
    since: datetime | None,
    until: datetime | None,
    cockpit: Path | None,
    wide: bool,
    dask: str | None,
    as_json: bool,
    with_prometheus: bool,
) -> int:
    """List findings, the most GPU-hours held first.

    The score of a finding is the sum of the weights of its dimensions that are met; unmeasured dimensions are
    unknown and add nothing. "waits" is the number of pending jobs that the held GPUs could serve. Kinds about jobs
    without GPUs are listed only if --kind names them.

    With --dask, the workers of a Dask cluster read the stored GPU metrics, which they need at the same path.
    """
    if dask and (live or with_prometheus or cockpit is not None):
        raise click.UsageError(
            "--dask is for stored GPU metrics, and --live, --prometheus and --clustercockpit replace them"
        )
    request = find.Request(
        since=since, until=until, clusters=clusters, partitions=partitions, accounts=accounts, users=users, nodes=nodes,
        kinds=tuple(dict.fromkeys("idle-allocation" if kind in VARIANTS else kind for kind in kinds)),
        variants=frozenset(kinds) & frozenset(VARIANTS), min_score=min_score, window_s=window_s, running_only=running,
    )  # fmt: skip
    slurm = functools.partial(open_client, config.slurm.backend)  # type: ignore[arg-type]
    with stages(quiet=as_json) as step, spreading(dask, config) as spread_over:
        history = prometheus_history(config, request, step) if with_prometheus else None
        if cockpit is not None:
            assessment = find.clustercockpit(config, request, cockpit)
        elif live:
            assessment = live_findings.find_live(
                config, request, slurm=slurm, watch_s=watch_s, history=history, step=step
            )
        else:
            assessment = find.find(config, request, slurm=slurm, history=history, step=step, spreading=spread_over)
    if as_json:
        print_json(assessment_json(assessment))
    else:
        print_assessment(assessment, wide=wide, explain=None if cockpit is not None else _explain_options(live=live))
        for note in assessment.notes:
            warn(note)
    if cockpit is None:
        record_listing(config, "list --live" if live else "list", assessment.findings)
    return 1 if assessment.findings else 0


def _explain_options(*, live: bool) -> str:
    """Return the options of this command that ``explain`` needs to use the same data."""
    context = click.get_current_context()
    options = {param.name: param for param in explain.params if isinstance(param, click.Option)}
    words = []
    for name, value in context.params.items():
        on_command_line = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if (
            not on_command_line
            or name not in options
            or name in ("since", "until", "as_json")
            or (name == "watch_s" and not live)
        ):
            continue
        option = options[name].opts[0]
        if options[name].is_flag:
            words.append(option)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words += [option, f"{item:g}s" if isinstance(item, float) else shlex.quote(str(item))]
    return " ".join(["", *words])


def prometheus_history(config: Config, request: find.Request, step: Callable[[str], None]) -> find.History:
    """Return a function that reads the samples of the requested Prometheus server for this command."""
    from slurm_affinode.pipeline import ingest  # noqa: PLC0415 - not needed for stored and live data

    until = request.until or datetime.now(UTC)
    since = request.since or until - timedelta(seconds=parse_span_s(config.zombies.look_back))
    options = ingest.read_options(config)
    step("reading Prometheus")
    return lambda: ingest.borrowed(config.prometheus, since, until, options, warned=warn)


@command(epilog=_EXPLAIN_EPILOG)
@config_options
@slurm_options
@prometheus_options
@click.argument("job")
@click.option("--cluster", metavar="NAME", help="Select the cluster, if several have a job with this ID")
@click.option("--since", type=When(), metavar="TIME", help="Begin at TIME [default: start of the job]")
@click.option("--until", type=When(), metavar="TIME", help="End before TIME [default: end of the stored samples]")
@click.option("--window", "window_s", type=Span(), metavar="SPAN", help="Replace the windows of the signatures")
@click.option("--live", is_flag=True, help="Query the live Slurm, the job's nodes, and Prometheus if configured")
@click.option("--watch", "watch_s", type=Span(), metavar="SPAN",
              help="Sample for SPAN (with --live) [default: shortest window, up to 2 minutes]")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a page to FILE")
@json_option
def explain(
    *,
    config: Config,
    job: str,
    cluster: str | None,
    since: datetime | None,
    until: datetime | None,
    window_s: float | None,
    live: bool,
    watch_s: float | None,
    html: Path | None,
    as_json: bool,
    with_prometheus: bool,
) -> int:
    """Show all evidence about a job's GPUs, for and against a finding, including what is unknown.

    JOB is 123, 123_4 or 123+1. For owners as well as administrators: it shows each measurement, its limit, and
    possible remedies.
    """
    slurm = functools.partial(open_client, config.slurm.backend)  # type: ignore[arg-type]

    def borrowed(step: Callable[[str], None]) -> find.History:
        return prometheus_history(config, find.Request(since=since, until=until), step)

    def page_now() -> Explanation:
        with stages(quiet=as_json) as step:
            return explanations.explain_live(
                config, job, NodeSampler(asker(config), say=step), slurm=slurm, since=since, until=until,
                window_s=window_s, watch_s=watch_s,
                history=borrowed(step) if with_prometheus or config.prometheus.url else None,
            )  # fmt: skip

    def page_stored() -> Explanation:
        return explanations.explain(
            config, job, cluster=cluster, since=since, until=until, window_s=window_s, slurm=slurm,
            history=borrowed(lambda _: None) if with_prometheus else None,
        )  # fmt: skip

    if live or watch_s is not None:
        page = page_now()
    else:
        try:
            page = page_stored()
        except (explanations.NoAttemptError, NoStoreError, UnreachableError) as stored:
            try:
                page = page_now()
            except AffinodeError as error:
                raise explained_to_owner(config, stored, error) from None
    _show_page(page, html, as_json=as_json)
    record_listing(config, f"explain {job}", page.findings, job=job)
    return 0


def explained_to_owner(config: Config, stored: AffinodeError, live: AffinodeError) -> AffinodeError:
    """Return the error to show if neither stored nor live data has a job.

    A user who is not the one of ``nightly`` has no database, and is not to create one: the reason is that of the live
    data.
    """
    chosen = config.store.state_dir is not None or config.store.db is not None
    if not isinstance(stored, NoStoreError) or chosen or os.geteuid() == 0:
        return stored
    hint = "the site can publish summaries to owners: nightly.jobs.directory"
    if config.nightly.jobs.directory is not None:
        hint = "slurm-affinode job JOBID shows the summary that the site has published"
    return NoStoreError(
        str(live), hint=f"ended jobs are in the site's database, which only administrators read; {hint}"
    )


def _show_page(page: Explanation, html: Path | None, *, as_json: bool) -> None:
    if html is not None:
        from slurm_affinode.report import findings_page  # noqa: PLC0415

        text = findings_page.render(page, zone())
        with delivering(html) as target:
            target.write_text(text, encoding="utf-8")
    if as_json:
        print_json(page.as_json())
    elif html is not None:
        echo(f"wrote {html!s}")
    else:
        print_explanation(page)


@group()
def signatures() -> None:
    """Check and test the signature file."""


@signatures.command()
@config_options
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
def check(*, config: Config, file: Path | None, as_json: bool) -> int:
    """Check FILE and report errors by line. [default: the site's file, else the built-in one]

    Exit status: 0 valid, 1 errors found, 2 unreadable.
    """
    where = _signatures_path(config, file)
    parsed = signature_files.parse(find.read_signatures(where))
    if as_json:
        print_json({
            "file": where,
            "signatures": [
                {"name": signature.name, "kind": signature.kind, "line": signature.line}
                for signature in parsed.signatures
            ],
            "faults": [{"line": fault.line, "text": fault.message, "hint": fault.hint} for fault in parsed.faults],
        })  # fmt: skip
    else:
        for fault in parsed.faults:
            echo(f"{where}:{fault.line}: {fault.message}")
            if fault.hint:
                echo(f"  {fault.hint}")
        if not parsed.faults:
            print_signatures(where, parsed)
    return 1 if parsed.faults else 0


@signatures.command()
@config_options
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
def test(*, config: Config, file: Path | None, as_json: bool) -> int:
    """Test the signatures of FILE on the examples that it contains.

    Exit status: 0 all examples match, 1 a mismatch or no examples, 2 invalid file.
    """
    where = _signatures_path(config, file)
    tried = signature_files.try_examples(find.site_signatures(config, where))
    wrong = [trial for trial in tried if not trial.ok]
    if as_json:
        print_json([
            {"signature": trial.example.signature, "says": trial.example.claim, "line": trial.example.line,
             "expected": trial.example.fits, "fits": trial.verdict.fits, "score": round(trial.verdict.score, 3),
             "why_not": trial.verdict.why_not, "ok": trial.ok}
            for trial in tried
        ])  # fmt: skip
    else:
        print_tried(where, tried)
    return 1 if wrong or not tried else 0


def _signatures_path(config: Config, file: Path | None) -> Path:
    return file or config.zombies.signatures or asset_dir("reports") / "signatures.toml"
