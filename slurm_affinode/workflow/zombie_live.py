"""``zombies list --live``: Slurm is asked once, and every node with GPUs once; and what is known of one job then.

How long a GPU is idle: see ``zombie_look``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from slurm_affinode.analysis import squatters
from slurm_affinode.analysis.queue import Queue, Waiting, waits, with_impact
from slurm_affinode.analysis.squatters import Seen
from slurm_affinode.config import Config
from slurm_affinode.core.signature import GpuFacts, RunFacts, Signature, Verdict, judge
from slurm_affinode.core.spans import counted
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history.store import SampleStore
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import Finding, GpuEvidence, JobRef
from slurm_affinode.slurm import jobid
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import zombie_live_misfits as misfits
from slurm_affinode.workflow import zombie_look as looking
from slurm_affinode.workflow import zombie_orphans as orphans
from slurm_affinode.workflow import zombies
from slurm_affinode.workflow.zombie_look import Eyes, Looks, Past, Watched
from slurm_affinode.workflow.zombie_nodes import Ask, asker
from slurm_affinode.workflow.zombies import Found, History, Request, Snapshot


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a live look knows."""

    snapshot: Snapshot
    """With the jobs as they are at the end of the look."""
    before: Sequence[Job]
    """The jobs as they were when it began."""
    looks: Looks
    signatures: Sequence[Signature]
    past: Past | None
    since: datetime
    at: datetime
    notes: tuple[str, ...]
    history: SampleStore
    """Open while the look lasts."""

    def facts(self, job: Job, one: Watched) -> tuple[GpuFacts, datetime | None]:
        """A GPU of a job, and since when it is idle."""
        return looking.facts_now(job, one, self.past, self.at, self.looks.watched_s)

    def run(self, job: Job) -> RunFacts:
        """The run of a job that holds GPUs."""
        elapsed = None if job.start is None else (self.at - job.start).total_seconds()
        return RunFacts(job.state, job.state == "RUNNING", elapsed, job.time_limit_s)


def find(
    config: Config,
    request: Request,
    *,
    slurm: Callable[[], SlurmClient],
    ask: Ask | None = None,
    watch_s: float | None = None,
    history: History | None = None,
    step: Callable[[str], None] | None = None,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Found:
    """Findings as they are now. Raises ``UnreachableError`` where slurmctld does not answer."""
    eyes = Eyes(ask or asker(config), now, sleep, step or (lambda _: None))
    with observe(config, request, eyes, slurm=slurm, watch_s=watch_s, history=history) as seen:
        return judged(config, request, seen)


@contextlib.contextmanager
def observe(
    config: Config,
    request: Request,
    eyes: Eyes,
    *,
    slurm: Callable[[], SlurmClient],
    watch_s: float | None = None,
    history: History | None = None,
    only: Callable[[Sequence[Job]], Sequence[Job]] | None = None,
) -> Iterator[Observed]:
    """Ask Slurm once, the nodes for ``watch_s``, and the history. ``only``: look at the nodes of these jobs alone.

    Slurm is asked for the jobs again where it was looked for a time: what ended meanwhile did not idle since; and
    where something seems to be of no job: that may have begun meanwhile.
    """
    file = zombies.signatures(config)
    if request.window_s is not None:
        file = file.with_window(request.window_s)
    eyes.say("asking Slurm")
    with slurm() as client:
        jobs, nodes = client.overview(), client.nodes()
        cluster = config.cluster.name or client.config().get("ClusterName") or "default"
    wanted = set(request.nodes) or {node.name for node in nodes}
    if only is not None:
        wanted = {name for job in only(jobs) for name in job.nodes}
    there = [node for node in nodes if node.gpus and node.powered and node.name in wanted]
    notes = zombies.strangers(request, nodes)
    notes += [f"{node.name} does not answer slurmctld: unknown" for node in there if not node.responding]
    names = {node.name: node.gpus.count for node in there if node.responding and node.gpus}
    eyes.say(f"asking {counted(len(names), 'node')}")
    limit = max((one.compute.at_most_pct for one in file.signatures), default=5.0)
    looks = looking.look(names, jobs, eyes, watch_s=watch_s or 0.0, limit_pct=limit,
                         floors_pct=config.agent.floors_pct)  # fmt: skip
    later = jobs
    if watch_s or orphans.seem(jobs, looks.told, looks.answers):
        try:
            with slurm() as client:
                later = client.overview()
        except AffinodeError as error:
            notes.append(f"which jobs began and ended during the look is not known: {error}")
        looks = looking.still(looks, jobs, later)
    notes += [f"{one.node} is unknown: {one.problem}" for one in looks.told if not one.by]
    notes += [f"{one.node}: processes are unknown: {one.problem}" for one in looks.told if one.by == "exporter"]
    moment = datetime.fromtimestamp(eyes.now(), UTC)
    with (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as store:
        eyes.say("following the GPUs")
        since, past = looking.past(config, request, later, looking.timed(looks), limit, moment, store, notes)
        snapshot = Snapshot(cluster, later, nodes)
        yield Observed(snapshot, jobs, looks, file.signatures, past, since, moment, tuple(notes), store)


def judged(config: Config, request: Request, seen: Observed) -> Found:
    """The findings of a look."""
    (cluster, jobs, nodes), moment, looks = _parts(seen.snapshot), seen.at, seen.looks
    found = [one for job in jobs if (one := _job(job, seen)) is not None]
    looked = misfits.Now(seen.snapshot, looks.told, looking.timed(looks), moment)
    refs = {job.job_id: functools.partial(job_ref, job) for job in jobs if job.allocated}
    shapes, unknown = misfits.find(config, request, looked, seen.history, refs)
    found += shapes
    completing_s = parse_span_s(config.zombies.completing)
    found += orphans.find(
        cluster, jobs, nodes, looks.told, looks.answers, moment, before=seen.before, completing_s=completing_s
    )
    kinds = {gpu.node: gpu.model for one in looks.answers for gpu in one.gpus}
    types = {job.job_id: job.gpus_allocated.kind for job in jobs if job.gpus_allocated}

    def gpu_type(one: Finding) -> str | None:
        own = types.get(one.job.job_id) if one.job else None
        return own or zombies.type_of(kinds.get(one.nodes[0]) if one.nodes else None)

    found = with_impact(found, Queue(_waiting(jobs, cluster, moment)), gpu_type=gpu_type, nodes=nodes)
    holding = [job for job in jobs if job.allocated and (job.gpus_allocated or looks.mine.get(job.job_id))]
    unmeasured = sum(not one.gpu.signals_pct for one in looks.whole)
    about = Found((), seen.since, moment, "live", len(holding), len(looks.whole), unmeasured,
                  (*seen.notes, *unknown, *_unseen(seen)), snapshot=seen.snapshot)  # fmt: skip
    return zombies.select(about, found, request)


def _parts(snapshot: Snapshot) -> tuple[str, Sequence[Job], Sequence[Node]]:
    return snapshot.cluster, snapshot.jobs, snapshot.nodes


def _unseen(seen: Observed) -> Iterator[str]:
    """Jobs with a part of a GPU of which nothing can be said."""
    sharing = [job for job in seen.snapshot.jobs if job.state == "RUNNING" and job.shares_gpus]
    mine, watched = seen.looks.mine, seen.looks.watched
    parts = {job.id: mine.get(job.job_id, ()) for job in sharing if not job.gpus_allocated}
    dark = [name for name, on in parts.items() if not any(watched[gpu.key].gpu.signals_pct for gpu in on)]
    if dark:
        more = f" and {len(dark) - 3} more" if len(dark) > 3 else ""
        yield f"what {', '.join(dark[:3])}{more} did on shared GPUs cannot be told apart: unknown"


def _job(job: Job, seen: Observed) -> Finding | None:
    """What the GPUs of a job amount to."""
    on, watched = seen.looks.mine.get(job.job_id, ()), seen.looks.watched
    if job.state != "RUNNING" or job.start is None or not on:
        return None
    if not any(watched[gpu.key].idle_since is not None for gpu in on):
        return None  # every one computes, or is unknown: no signature fits
    sights = [see(job, watched[gpu.key], seen, gpu.mapping)[0] for gpu in on]
    row = {"cluster": seen.snapshot.cluster, "user": job.user, "account": job.account, "qos": job.qos,
           "partition": next(iter(job.partitions), None),
           "gpus": None if job.gpus_allocated is None else job.gpus_allocated.count}  # fmt: skip
    return squatters.finding(job_ref(job), row, job.nodes, sights, "live")


def see(job: Job, one: Watched, seen: Observed, mapping: str | None) -> tuple[Seen, tuple[Verdict, ...]]:
    """A GPU of a job as it was seen, and what every signature says of it. ``mapping``: how it is known to be its."""
    facts, since = seen.facts(job, one)
    gpu, run = one.gpu, seen.run(job)
    shown = GpuEvidence(
        gpu.node, "?" if gpu.index is None else str(gpu.index), gpu.uuid, gpu.model, facts.memory_gib,
        facts.memory_total_gib, max(gpu.signals_pct.values(), default=None), facts.peak_pct, gpu.power_w, gpu.xid,
        facts.idle_s, None, measured=bool(gpu.signals_pct), mapping=mapping, shared=gpu.part_of is not None,
    )  # fmt: skip
    verdicts = tuple(judge(signature, facts, run) for signature in seen.signatures)
    fits = next((verdict for verdict in verdicts if verdict.fits), None)
    computes = fits is None and bool(gpu.signals_pct) and one.idle_since is None
    shown = shown if fits is None else replace(shown, flagged=True)
    return Seen(shown, fits, computes, since, facts.idle_s or 0.0, seen.at), verdicts


def job_ref(job: Job) -> JobRef:
    """A job of the live cluster as findings name it."""
    steps = tuple(one.step for one in job.steps or ())
    return JobRef(job.job_id, job.id, job.submit, job.start, job.end if job.ended else None, job.name, job.state,
                  job.time_limit_s, job.restarts, job.batch, steps)  # fmt: skip


def _waiting(jobs: Iterable[Job], cluster: str, now: datetime) -> list[Waiting]:
    return [
        Waiting(job.id, cluster, job.partitions, job.gpus_requested.count, job.eligible or job.submit or now, now,
                job.gpus_requested.kind, job.node_count or 1, job.features, job.priority or 0, job.user,
                jobid.tasks_in(job.array_tasks)[0], job.array_limit, job.nodes_required, job.nodes_excluded)
        for job in jobs
        if job.pending and not job.held and job.gpus_requested and waits(job.reason)
        and (job.eligible or job.submit or now) < now
    ]  # fmt: skip
