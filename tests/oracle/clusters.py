"""Random small clusters, drawn by Hypothesis: hours of samples, a few nodes, GPUs and jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from oracle.model import Cluster, Gpu, Recorded, Run, Sample

FEATURES = frozenset(
    {
        "missing", "nan", "floor", "jitter", "requeue", "array", "het", "several-nodes", "shared-gpus", "shards",
        "replaced", "lost", "earlier", "labels", "wrong-labels", "recorded", "names", "running", "stale",
        "mig", "array-labels", "left-labels", "renamed", "suspended", "lost-jobs", "in-turn", "neighbor",
        "repeated-hour",
    }
)  # fmt: skip
"""Optional features of clusters, besides gaps and shared nodes."""

ORIGINS = (
    ("UTC", 1793649600),  # 2026-11-02T20:00Z
    ("Europe/Berlin", 1792879200),  # 2026-10-24T22:00Z, three hours before the clocks go back
    ("Europe/Berlin", 1774735200),  # 2026-03-28T22:00Z, three hours before the clocks go forward
    ("Australia/Lord_Howe", 1775307600),  # 2026-04-04T13:00Z, two hours before the clocks go back by half an hour
)
SPAN_MIN = 240
"""Samples and runs start within this time."""

Values = dict[str, float | None]
_ACTIVITY = ("util_pct", "engine_active", "sm_active", "tensor_active", "dram_active")
_LEVELS: dict[str, tuple[Values, ...]] = {
    "idle": (dict.fromkeys(_ACTIVITY, 0.0),),
    "low": (
        {**dict.fromkeys(_ACTIVITY, 0.0), "util_pct": 5.0},
        {**dict.fromkeys(_ACTIVITY, 0.01), "util_pct": 0.0},
        {**dict.fromkeys(_ACTIVITY, 0.0), "sm_active": 0.05, "dram_active": 0.05},
        {**dict.fromkeys(_ACTIVITY, 0.0), "dram_active": 0.0006},
    ),
    "busy": (
        {**dict.fromkeys(_ACTIVITY, 0.9), "util_pct": 97.0},
        {**dict.fromkeys(_ACTIVITY, 0.0), "util_pct": 100.0},
        {**dict.fromkeys(_ACTIVITY, 0.0), "util_pct": 6.0, "sm_active": 0.0501},
        {**dict.fromkeys(_ACTIVITY, 0.06), "util_pct": 0.0},
    ),
    "floor": (
        {**dict.fromkeys(_ACTIVITY, 0.0), "dram_active": 0.000131},
        {**dict.fromkeys(_ACTIVITY, 0.0), "dram_active": 0.0005},
        {**dict.fromkeys(_ACTIVITY, 1.75e-9), "util_pct": 0.0},
    ),
    "nan": (
        dict.fromkeys(_ACTIVITY, None),
        {**dict.fromkeys(_ACTIVITY, None), "dram_active": 0.0},
        {**dict.fromkeys(_ACTIVITY, None), "util_pct": 40.0},
    ),
}


@dataclass(slots=True)
class _Slot:
    """A GPU slot of a node, with the GPUs that were installed in it one after the other."""

    node: str
    index: int
    gpus: list[Gpu]

    def at(self, time_ms: int) -> Gpu | None:
        """Return the latest GPU sampled by this time, otherwise the first one."""
        sampled = [g for g in self.gpus if g.samples and g.samples[0].time_ms <= time_ms]
        return (sampled or self.gpus or [None])[-1]


@st.composite
def clusters(draw: st.DrawFn, features: frozenset[str] = FEATURES) -> Cluster:
    """Draw a cluster that has some of ``features``."""
    zone, origin = draw(st.sampled_from(ORIGINS))
    since = origin + 60 * draw(st.integers(0, 90))
    until = since + 60 * draw(st.integers(20, SPAN_MIN))
    accounted = until + draw(st.sampled_from([0, 60, 3600]))
    if "running" in features and draw(st.integers(0, 5)) == 0:
        accounted = since + 60 * draw(st.integers(1, SPAN_MIN))
    lost_s = draw(st.sampled_from([0] * 11 + [3600, 7200])) if "lost-jobs" in features else 0
    if lost_s:  # Slurm lost a job in the interval, as only later accounting shows
        accounted = until + 3 * 86_400
    now = accounted + (draw(st.sampled_from([0, 0, 1800, 36_000])) if "stale" in features else 0)
    cluster = Cluster(since, until, accounted, now, zone, [], [], openmetrics=draw(st.booleans()))
    nodes = [f"n{i}" for i in range(1, draw(st.integers(1, 3 if "several-nodes" in features else 1)) + 1)]
    slots = [slot for node in nodes for slot in _slots(draw, features, node, origin)]
    cluster.gpus = [gpu for slot in slots for gpu in slot.gpus]
    cluster.neighbor = "neighbor" in features and draw(st.integers(0, 3)) == 0
    jobs = _Jobs(draw, features, cluster, slots)
    for number in range(draw(st.integers(1, 7))):
        jobs.add(100 * (number + 1), origin)
    if lost_s:
        start = since + 60 * draw(st.integers(-60, SPAN_MIN))
        cluster.runs.append(Run(9100, start, start, None, [draw(st.sampled_from(nodes))], 1, limit=lost_s))
    elif "lost-jobs" in features and draw(st.integers(0, 5)) == 0:
        start = since - 3 * 86_400
        limit = draw(st.sampled_from([None, 3600, 86_400, 216_000]))  # the last one is exceeded by less than a day
        node = draw(st.sampled_from(nodes))
        cluster.runs.append(Run(9000, start, start, None, [node], draw(st.integers(1, 2)), limit=limit))
    if "wrong-labels" in features and cluster.gpus and draw(st.integers(0, 4)) == 0:
        for gpu in draw(st.lists(st.sampled_from(cluster.gpus), max_size=2, unique_by=id)):
            begin = origin + 60 * draw(st.integers(0, SPAN_MIN))
            _label(gpu, draw(st.sampled_from([100, 200, 999])), begin, begin + 60 * draw(st.integers(1, 120)))
    if "in-turn" in features:
        cluster.gpus += [twin for gpu in list(cluster.gpus) if (twin := _twin(draw, gpu)) is not None]
    return cluster


# --- GPUs and samples -------------------------------------------------------------------------------------------------


def _slots(draw: st.DrawFn, features: frozenset[str], node: str, origin: int) -> list[_Slot]:
    """Draw the slots of a node and their metrics."""
    known = ("uuid", "pci", "index")
    if "names" in features:
        known = draw(st.sampled_from([known, known, known, ("uuid",), ("uuid", "index"), ("pci", "index"), ("index",)]))
    signals = draw(
        st.sampled_from([("util_pct",), ("util_pct", "sm_active", "dram_active"), ("dram_active",), _ACTIVITY])
    )
    signals += draw(st.sampled_from([("fb_used_mib", "power_w"), ("fb_used_mib",), ()]))
    result = []
    divided = "mig" in features and draw(st.integers(0, 3)) == 0
    instances = [(index, 1 + k if divided else None) for index in range(draw(st.integers(1, 2 if divided else 4)))
                 for k in range(draw(st.integers(1, 3)) if divided else 1)]  # fmt: skip
    for index, mig in instances:
        slot = _Slot(node, index, [])
        fate = draw(
            st.sampled_from(["sampled"] * 6 + [f for f in ("lost", "replaced", "earlier", "renamed") if f in features])
        )
        if mig is not None and fate in {"replaced", "renamed"}:
            fate = "sampled"
        times = [(0, SPAN_MIN + 60)]
        if fate == "lost":
            times = [(0, draw(st.integers(0, SPAN_MIN)))]
        elif fate == "replaced":
            at = draw(st.integers(0, SPAN_MIN))
            times = [(0, at), (at + draw(st.integers(1, 20)), SPAN_MIN + 60)]
        elif fate == "earlier":
            times = [(0, 0)]
        elif fate == "renamed" and len(known) > 1:
            at = draw(st.integers(0, SPAN_MIN))
            times = [(0, at), (at + 1, SPAN_MIN + 60)]
        before = draw(st.integers(0, 8)) if "earlier" in features else 0
        for number, (first, last) in enumerate(times):
            named = known
            if fate == "renamed" and not number and "index" in known:
                named = ("pci", "index") if "pci" in known and draw(st.booleans()) else ("index",)
            uuid = f"GPU-{node[1:]:0>8}-0000-4000-8000-{number:06d}{index:06d}" if "uuid" in named else None
            if uuid is None and slot.gpus:
                gpu = slot.gpus[0]
            else:
                pci = f"00000000:{16 * (index + 1):02X}:00.0" if "pci" in named else None
                gpu = Gpu(node, uuid, pci, index if "index" in named else None, [], mig)
                slot.gpus.append(gpu)
            if before and not number:
                day = (origin - before * 86_400) * 1000
                gpu.samples += [Sample(day + 60_000 * i, {signals[0]: 0.0}) for i in range(3)]
            gpu.samples += _samples(draw, features, signals, (origin + 60 * first) * 1000, (origin + 60 * last) * 1000)
        slot.gpus = [gpu for gpu in slot.gpus if gpu.samples]
        result.append(slot)
    return result


def _twin(draw: st.DrawFn, gpu: Gpu) -> Gpu | None:
    """Return the same GPU as named by another source, without UUID, which samples it in turn or at the same times."""
    if gpu.uuid is None or gpu.index is None or draw(st.integers(0, 7)):
        return None
    shift = draw(st.sampled_from([0, 7_000]))
    pci = gpu.pci if draw(st.booleans()) else None
    kept = draw(st.sampled_from([1.0, 0.0]))
    samples = [
        Sample(sample.time_ms + shift, {name: value and value * kept for name, value in sample.values.items()})
        for sample in gpu.samples
    ]
    return Gpu(gpu.node, None, pci, gpu.index, samples, gpu.mig)


def _samples(
    draw: st.DrawFn, features: frozenset[str], signals: tuple[str, ...], first_ms: int, last_ms: int
) -> Iterator[Sample]:
    """Draw phases that alternate between a few kinds of samples, separated by gaps."""
    if first_ms >= last_ms:
        return
    step_ms = 1000 * draw(st.sampled_from([60, 300, 120]))
    off = draw(st.sampled_from([0, 0, 7_000, 29_123] if "jitter" in features else [0]))
    shifts = draw(st.sampled_from([(0,), (0,), (0, 700, 0, 0, -1300)] if "jitter" in features else [(0,)]))
    levels = [level for level in _LEVELS if level in features or level in ("idle", "low", "busy")]
    time_ms, number = first_ms + off, 0
    while time_ms < last_ms:
        kinds = [
            _values(draw, features, level, signals)
            for level in draw(st.lists(st.sampled_from(levels), min_size=1, max_size=3))
        ]
        for count in range(draw(st.integers(1, 60))):
            if time_ms >= last_ms:
                break
            number += 1
            yield Sample(time_ms + shifts[number % len(shifts)], dict(kinds[count % len(kinds)]))
            time_ms += step_ms
        time_ms += step_ms * draw(st.sampled_from([0, 0, 0, 1, 2, 3, 10]))


def _values(draw: st.DrawFn, features: frozenset[str], level: str, signals: tuple[str, ...]) -> Values:
    values: Values = {}
    chosen = draw(st.sampled_from(_LEVELS[level]))
    for signal in signals:
        if signal in chosen:
            values[signal] = chosen[signal]
        else:
            choices = [0.0, 4096.0, 40_000.5] if signal == "fb_used_mib" else [55.5, 310.0]
            values[signal] = draw(st.sampled_from([*choices, None] if "nan" in features else choices))
    if "missing" in features and len(values) > 1 and draw(st.integers(0, 4)) == 0:
        del values[draw(st.sampled_from(sorted(values)))]
    return values


# --- Runs, labels, recorded GPU IDs -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Jobs:
    """Adds jobs to a cluster."""

    draw: st.DrawFn
    features: frozenset[str]
    cluster: Cluster
    slots: list[_Slot]
    had: list[tuple[Run, list[_Slot]]] = field(default_factory=list)
    """The slots of each run."""
    leader: bool = False
    """Labels are array job IDs."""

    def add(self, job_id: int, origin: int) -> None:
        """Add a job: one run, the runs of a requeued job, the tasks of an array, or the components of a het job."""
        kinds = ["plain"] * 3 + [kind for kind in ("requeue", "array", "het") if kind in self.features]
        kind = self.draw(st.sampled_from(kinds))
        start = origin + 60 * self.draw(st.integers(-60, SPAN_MIN))
        before: Run | None = None
        for part in range(1 if kind == "plain" else self.draw(st.integers(2, 3))):
            plain = "repeated-hour" in self.features and self.draw(st.integers(0, 3)) == 0
            length = 60 * self.draw(st.integers(1, 50 if plain else SPAN_MIN)) + self.draw(st.sampled_from([0, 0, 17]))
            self.leader = kind == "array" and "array-labels" in self.features and self.draw(st.integers(0, 3)) == 0
            submit = start - self.draw(st.sampled_from([0, 5, 1800]))
            run = Run(job_id, submit, start, start + length, [], 0, plain=plain)
            if kind == "array":
                run.job_id, run.array = job_id + part, [job_id, part]
            elif kind == "het":
                run.job_id, run.het = job_id + part, [job_id, part]
            elif kind == "requeue":
                run.submit = start - 1
            if not self._add(run, requeued=kind == "requeue"):
                return
            if kind == "requeue":
                if before is not None:
                    before.requeued = True
                if run.end is None:
                    return
                before, start = run, run.end + 60 * self.draw(st.integers(1, 30))
            elif kind == "array":
                start += 60 * self.draw(st.integers(0, 60))

    def _add(self, run: Run, *, requeued: bool) -> bool:
        """Allocate GPUs to the run; return whether free ones were available."""
        draw, now = self.draw, self.cluster.accounted
        if run.end is not None and run.end > now:
            if run.start >= now or "running" not in self.features:
                return False
            run.end, run.plain = None, False
        names = sorted({slot.node for slot in self.slots})
        run.nodes = draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True).map(sorted))
        shared = "shared-gpus" in self.features and draw(st.integers(0, 5)) == 0
        shard = "shards" in self.features and draw(st.integers(0, 7)) == 0
        had: list[_Slot] = []
        for node in run.nodes:
            on_node = [slot for slot in self.slots if slot.node == node]
            whole = draw(st.booleans())
            had += on_node if whole else draw(st.lists(st.sampled_from(on_node), min_size=1, unique_by=id))
        others = [slot for other, its in self.had for slot in its if _overlap(other, run, now)]
        if not shared and not shard and any(a is b for a in had for b in others):
            return False
        run.gpus = 0 if shard else len(had)
        if "suspended" in self.features and draw(st.integers(0, 4)) == 0:
            run.suspended = ((run.end or now) - run.start) * draw(st.integers(1, 4)) // 5
        self.had.append((run, had))
        self.cluster.runs.append(run)
        for node in run.nodes:
            self._name(run, node, [slot for slot in had if slot.node == node], requeued=requeued)
        return True

    def _name(self, run: Run, node: str, slots: list[_Slot], *, requeued: bool) -> None:
        """Record the GPUs of the run on a node in labels, in recorded IDs, in both or in neither."""
        draw = self.draw
        if "labels" in self.features and draw(st.booleans()):
            late = 60 * draw(st.sampled_from([0, 0, 5])) if "wrong-labels" in self.features else 0
            every = draw(st.sampled_from([1, 1, 1, 7]))
            job = run.array[0] if self.leader and run.array else run.job_id
            slots_of = list(slots)
            if draw(st.booleans()):  # as dcgm-exporter: all instances of a GPU have the labels of all of its jobs
                slots_of = [
                    s for s in self.slots if any((s.node, s.index) == (used.node, used.index) for used in slots)
                ]
            if requeued and "left-labels" in self.features and draw(st.booleans()):
                slots_of += [s for other, its in self.had for s in its if other.job_id == run.job_id and s.node == node]
            for gpu in (gpu for slot in slots_of for gpu in slot.gpus):
                _label(gpu, job, run.start, (run.end or self.cluster.accounted) + late, every)
        if "recorded" in self.features and draw(st.integers(0, 2)) == 0:
            for slot in draw(st.lists(st.sampled_from(slots), min_size=1, unique_by=id)):
                gpu = slot.at(run.start * 1000)
                known = [slot.index] if gpu is None else [n for n in (gpu.uuid, gpu.pci, gpu.index) if n is not None]
                begun = run.start if requeued else draw(st.sampled_from([run.start, None]))
                self.cluster.recorded.append(Recorded(run.job_id, begun, node, str(draw(st.sampled_from(known)))))


def _label(gpu: Gpu, job_id: int, start: int, end: int, every: int = 1) -> None:
    """Label the samples of an interval, or every ``every``-th of them.

    Samples without a value are not labeled: NaN in exposition text also marks the end of a series, and states no job.
    """
    samples = [s for s in gpu.samples if start * 1000 <= s.time_ms < end * 1000]
    for sample in samples[::every]:
        if job_id not in sample.jobs and any(value is not None for value in sample.values.values()):
            sample.jobs.append(job_id)


def _overlap(first: Run, other: Run, now: int) -> bool:
    return max(first.start, other.start) < min(first.end or now, other.end or now)
