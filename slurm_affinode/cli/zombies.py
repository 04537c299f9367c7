"""``slurm-affinode zombies``: list, explain, signatures."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from slurm_affinode.cli import zombie_show as show
from slurm_affinode.cli.main import LazyGroup
from slurm_affinode.cli.options import (
    Number,
    Span,
    When,
    config_options,
    json_option,
    print_json,
    printable,
    slurm_options,
    stages,
    warn,
    zone,
)
from slurm_affinode.cli.prometheus_options import prometheus_options
from slurm_affinode.config import Config
from slurm_affinode.core import signature_file
from slurm_affinode.core.explanation import Explanation
from slurm_affinode.errors import AffinodeError, NoStoreError, UnreachableError
from slurm_affinode.files import delivering
from slurm_affinode.model.finding import KINDS, VARIANTS
from slurm_affinode.resources import asset_dir
from slurm_affinode.slurm.backends import open_client
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import (
    gpu_intake,
    prometheus_intake,
    zombie_averages,
    zombie_explain,
    zombie_explain_live,
    zombie_live,
)
from slurm_affinode.workflow import zombies as workflow
from slurm_affinode.workflow.zombie_audit import note_look
from slurm_affinode.workflow.zombie_look import Eyes
from slurm_affinode.workflow.zombie_nodes import asker

_LIST_EPILOG = """\b
Examples:
  slurm-affinode zombies list                          from the stored history, up to its end
  slurm-affinode zombies list --live                   as it is now: Slurm, exporters and agents of the nodes
  slurm-affinode zombies list --kind squatter --partition gpu --window 30m
  slurm-affinode zombies list --since 7d --kind low-efficiency-user
  slurm-affinode zombies list --json | jq -r '.findings[] | select(.kind == "squatter").subject.id'

\b
Exit status: 0 nothing found, 1 something found, 2 unusable input, 3 something needed does not answer.
"""
_EXPLAIN_EPILOG = """\b
Examples:
  slurm-affinode zombies explain 123                   every GPU, every dimension, the time line
  slurm-affinode zombies explain 123_4 --html page.html
  slurm-affinode zombies explain 123 --live            as it is now; also for its owner, without a store
  slurm-affinode zombies explain 123 --live --watch 1h --html page.html

\b
Without --live that is done where the site's store cannot be read or does not have the job.
A look says what is, not for how long: that comes from --watch, --prometheus or a stored history that goes on.
"""
_COMMANDS = {
    "list": ("slurm_affinode.cli.zombies:list_", "Jobs that hold GPUs idle, orphans, stuck nodes, misfits."),
    "explain": ("slurm_affinode.cli.zombies:explain", "A page of evidence about one job, with its time line."),
    "warn": ("slurm_affinode.cli.zombie_act:warn_", "Tell owners and administrators. A dry run unless --yes."),
    "clean": ("slurm_affinode.cli.zombie_act:clean", "Cancel, suspend, end, drain, resume. A dry run unless --yes."),
    "policy": ("slurm_affinode.cli.zombie_admin:policy", "Check the policy; what it would have done last week."),
    "history": ("slurm_affinode.cli.zombie_admin:history", "The audit: who did what, when, on what evidence."),
    "users": ("slurm_affinode.cli.zombie_usage:users", "Who uses how much, with and without GPUs."),
    "queue": ("slurm_affinode.cli.zombie_usage:queue", "Who waits, the longest wait first."),
    "install": ("slurm_affinode.cli.zombie_install:install", "Install the timer, or the crontab."),
    "signatures": ("slurm_affinode.cli.zombies:signatures", "Check and test the file of signatures."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def zombies() -> None:
    """Find who holds GPUs without using them, with evidence; warn and clean up."""


def filters(function: Any) -> Any:
    """Add the options that choose findings."""
    options = [
        click.option("--cluster", "clusters", multiple=True, metavar="NAME", help="Only this cluster. Repeatable."),
        click.option("--partition", "-p", "partitions", multiple=True, metavar="NAME", help="Only this partition."),
        click.option("--account", "-A", "accounts", multiple=True, metavar="NAME", help="Only this account."),
        click.option("--user", "-u", "users", multiple=True, metavar="NAME", help="Only this user."),
        click.option("--node", "-w", "nodes", multiple=True, metavar="NAME", help="Only what is on this node."),
        click.option("--kind", "-k", "kinds", multiple=True, type=click.Choice([*KINDS, *VARIANTS]), metavar="KIND",
                     help=f"Only this kind: {', '.join(KINDS)}; or a variant: {', '.join(VARIANTS)}."),
        click.option("--min-score", type=Number(0, 1), default=0.0, metavar="SCORE",
                     help="Only what scores at least this much, 0-1."),
        click.option("--window", "window_s", type=Span(), metavar="SPAN",
                     help="Idle for at least this long, in place of the windows of the signatures."),
    ]  # fmt: skip
    return functools.reduce(lambda made, option: option(made), reversed(options), function)


@click.command("list", epilog=_LIST_EPILOG)
@config_options
@slurm_options
@prometheus_options
@filters
@click.option("--running", is_flag=True, help="Only jobs that still run.")
@click.option("--live", is_flag=True, help="As it is now: ask Slurm once, and the exporters and agents of the nodes.")
@click.option("--watch", "watch_s", type=Span(), metavar="SPAN",
              help="With --live: look at the exporters for so long, where no agent knows since when.")  # fmt: skip
@click.option("--since", type=When(), metavar="TIME", help="Begin. [default: 2d before the end]")
@click.option("--until", type=When(), metavar="TIME", help="End, not included. [default: the end of the history]")
@click.option(
    "--clustercockpit",
    "cockpit",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="In place of the stored history: the averages in ClusterCockpit's job database.",
)
@click.option("--wide", is_flag=True, help="The whole evidence in the table.")
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
    as_json: bool,
    asked: bool,
) -> int:
    """List what is found, the most GPU-hours held first.

    Every finding has a score: the sum of the weights of the dimensions that speak for it. What could not be measured is
    unknown and counts for nothing. "waits" is the number of waiting jobs that the held GPUs would satisfy. Kinds about
    jobs without GPUs are looked for only where --kind names them.
    """
    request = workflow.Request(
        since=since, until=until, clusters=clusters, partitions=partitions, accounts=accounts, users=users, nodes=nodes,
        kinds=tuple(dict.fromkeys("idle-allocation" if kind in VARIANTS else kind for kind in kinds)),
        variants=frozenset(kinds) & frozenset(VARIANTS), min_score=min_score, window_s=window_s, running_only=running,
    )  # fmt: skip
    slurm = functools.partial(open_client, config.slurm.backend)  # type: ignore[arg-type]
    with stages(quiet=as_json) as step:
        history = prometheus_history(config, request, step) if asked else None
        if cockpit is not None:
            found = zombie_averages.clustercockpit(config, request, cockpit)
        elif live:
            found = zombie_live.find(config, request, slurm=slurm, watch_s=watch_s, history=history, step=step)
        else:
            found = workflow.find(config, request, slurm=slurm, history=history, step=step)
    if as_json:
        print_json(show.found_json(found))
    else:
        show.print_found(found, wide=wide, explain=None if cockpit is not None else _explain_options(live=live))
        for note in found.notes:
            warn(note)
    if cockpit is None:
        note_look(config, "list --live" if live else "list", found.findings)
    return 1 if found.findings else 0


def _explain_options(*, live: bool) -> str:
    """The options of this command that ``explain`` needs, too, to see the same."""
    context = click.get_current_context()
    known = {param.name: param for param in explain.params if isinstance(param, click.Option)}
    words = []
    for name, value in context.params.items():
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name not in known or name in ("since", "until", "as_json") or (name == "watch_s" and not live):
            continue
        option = known[name].opts[0]
        if known[name].is_flag:
            words.append(option)
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [option, f"{one:g}s" if isinstance(one, float) else shlex.quote(str(one))]
    return " ".join(["", *words])


def prometheus_history(config: Config, request: workflow.Request, step: Callable[[str], None]) -> workflow.History:
    """The history of the server that was asked for, for this command alone."""
    until = request.until or datetime.now(UTC)
    since = request.since or until - timedelta(seconds=parse_span_s(config.zombies.look_back))
    options = gpu_intake.read_options(config)
    step("reading Prometheus")
    return lambda: prometheus_intake.borrowed(config.prometheus, since, until, options, warned=warn)


@click.command(epilog=_EXPLAIN_EPILOG)
@config_options
@slurm_options
@prometheus_options
@click.argument("job")
@click.option("--cluster", metavar="NAME", help="Where several clusters have a job of this number.")
@click.option("--since", type=When(), metavar="TIME", help="Begin. [default: the start of the job]")
@click.option("--until", type=When(), metavar="TIME", help="End, not included. [default: the end of the history]")
@click.option("--window", "window_s", type=Span(), metavar="SPAN", help="In place of the windows of the signatures.")
@click.option(
    "--live", is_flag=True, help="As it is now: ask Slurm and the nodes of the job; and Prometheus where that is set."
)
@click.option("--watch", "watch_s", type=Span(), metavar="SPAN",
              help="With --live: look for so long. [default: the shortest window, up to 2 minutes]")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a page there.")
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
    asked: bool,
) -> int:
    """Show everything that is known of a job's GPUs: evidence for and against, and what is unknown.

    JOB is 123, 123_4 or 123+1. For the job's owner as much as for an administrator: it says in plain words what was
    measured, what it was held against, and what can be done.
    """
    slurm = functools.partial(open_client, config.slurm.backend)  # type: ignore[arg-type]

    def borrowed(step: Callable[[str], None]) -> workflow.History:
        return prometheus_history(config, workflow.Request(since=since, until=until), step)

    def page_now() -> Explanation:
        with stages(quiet=as_json) as step:
            return zombie_explain_live.explain(
                config, job, Eyes(asker(config), say=step), slurm=slurm, since=since, until=until, window_s=window_s,
                watch_s=watch_s, history=borrowed(step) if asked or config.prometheus.url else None,
            )  # fmt: skip

    def page_stored() -> Explanation:
        return zombie_explain.explain(
            config, job, cluster=cluster, since=since, until=until, window_s=window_s, slurm=slurm,
            history=borrowed(lambda _: None) if asked else None,
        )  # fmt: skip

    if live or watch_s is not None:
        page = page_now()
    else:
        try:
            page = page_stored()
        except (zombie_explain.UnknownJobError, NoStoreError, UnreachableError) as stored:
            try:
                page = page_now()
            except AffinodeError:
                raise stored from None
    _show_page(page, html, as_json=as_json)
    note_look(config, f"explain {job}", page.findings, job=job)
    return 0


def _show_page(page: Explanation, html: Path | None, *, as_json: bool) -> None:
    if html is not None:
        from slurm_affinode.report import zombie_page  # noqa: PLC0415

        text = zombie_page.render(page, zone())
        with delivering(html) as target:
            target.write_text(text, encoding="utf-8")
    if as_json:
        print_json(page.as_json())
    elif html is not None:
        click.echo(f"wrote {printable(str(html))}")
    else:
        show.print_explanation(page)


@click.group()
def signatures() -> None:
    """Check and test the file of signatures."""


@signatures.command()
@config_options
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
def check(*, config: Config, file: Path | None, as_json: bool) -> int:
    """Say by line what is wrong with FILE. [default: the site's file, else the one that comes with the package]

    Exit status: 0 it is right, 1 something is wrong with it, 2 it cannot be read.
    """
    where = _where(config, file)
    parsed = signature_file.parse(workflow.read_signatures(where))
    if as_json:
        print_json({
            "file": where,
            "signatures": [{"name": one.name, "kind": one.kind, "line": one.line} for one in parsed.signatures],
            "faults": [{"line": one.line, "text": one.text, "hint": one.hint or None} for one in parsed.faults],
        })  # fmt: skip
    else:
        for fault in parsed.faults:
            click.echo(printable(f"{where}:{fault.line}: {fault.text}"))
            if fault.hint:
                click.echo(printable(f"  {fault.hint}"))
        if not parsed.faults:
            show.print_signatures(where, parsed)
    return 1 if parsed.faults else 0


@signatures.command()
@config_options
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
def test(*, config: Config, file: Path | None, as_json: bool) -> int:
    """Hold the examples that FILE carries against its signatures.

    Exit status: 0 all are judged as they say, 1 one is not or there are none, 2 the file is wrong.
    """
    where = _where(config, file)
    tried = signature_file.try_examples(workflow.signatures(config, where))
    wrong = [one for one in tried if not one.ok]
    if as_json:
        print_json([
            {"signature": one.example.signature, "says": one.example.says, "line": one.example.line,
             "expected": one.example.fits, "fits": one.verdict.fits, "score": round(one.verdict.score, 3),
             "why_not": one.verdict.why_not, "ok": one.ok}
            for one in tried
        ])  # fmt: skip
    else:
        show.print_tried(where, tried)
    return 1 if wrong or not tried else 0


def _where(config: Config, file: Path | None) -> Path:
    return file or config.zombies.signatures or asset_dir("reports") / "signatures.toml"
