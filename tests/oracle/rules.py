"""The rules of ``docs/metrics.md`` as plain Python that processes each sample on its own.

Independent of the package: nothing is imported from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from zoneinfo import ZoneInfo

from oracle.model import Cluster, Gpu, Recorded, Run, Sample

IDLE_PCT, LOW_PCT, MAX_GAP_STEPS = 0.0, 5.0, 3.0
FLOOR_PCT = {"engine_active": 1e-6, "sm_active": 1e-6, "tensor_active": 1e-6, "dram_active": 0.05}
"""Percent; a value at or below the floor of its signal counts as 0."""
DAY_MS, LOOK_BACK_S = 86_400_000, 7 * 86_400
HOUR_MS = 3_600_000

KINDS = {
    "labels": "gpu_hours_by_labels", "recorded": "gpu_hours_by_records", "whole-node": "gpu_hours_by_whole_node",
}  # fmt: skip
"""Mapping of a GPU -> its part of the allocated hours."""

Slot = tuple[str, object, int | None]
"""Node, place, MIG instance."""
Pairs = dict[int, dict[int, str]]
"""Index of a run -> index of one of its GPUs -> mapping."""


@dataclass(slots=True)
class _Placed(Gpu):
    """A GPU with the name of its place on the node."""

    place: object = None


@dataclass(slots=True)
class Figures:
    """The figures of a run or the total. Hours are GPU-hours; None: unknown."""

    gpu_hours_allocated: float = 0.0
    gpu_hours_measured: float = 0.0
    gpu_hours_unknown: float = 0.0
    gpu_hours_idle: float | None = None
    gpu_hours_low: float | None = None
    gpu_hours_busy: float | None = None
    util_mean_pct: float | None = None
    mem_gib_h: float | None = None
    idle_mem_gib_h: float | None = None
    fb_peak_gib: float | None = None
    energy_kwh: float | None = None
    idle_energy_kwh: float | None = None
    idle_windows: int | None = None
    longest_idle_s: float | None = None
    gpu_hours_by_labels: float = 0.0
    gpu_hours_by_records: float = 0.0
    gpu_hours_by_whole_node: float = 0.0
    gpu_hours_unmapped: float = 0.0
    gpu_hours_capacity: float | None = None
    """Of the total only."""


@dataclass(slots=True)
class Report:
    """The figures of a cluster."""

    total: Figures
    runs: dict[tuple[int, int], Figures]
    """Job ID and submit time -> figures; runs with GPUs that overlap the interval."""
    mapping: dict[tuple[int, int], dict[str, str]]
    """Job ID and submit time -> name of a GPU -> ``labels``, ``recorded`` or ``whole-node``."""


@dataclass(slots=True)
class _Sums:
    """Sums over the samples of one run."""

    hours: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("idle", "low", "busy"), 0.0))
    util: float = 0.0
    util_hours: float = 0.0
    mem: float | None = None
    idle_mem: float = 0.0
    peak: float | None = None
    energy: float | None = None
    idle_energy: float = 0.0
    windows: list[tuple[float, float]] = field(default_factory=list)


def report(cluster: Cluster) -> Report:
    """Compute the figures of ``cluster``."""
    cluster = _identified(cluster)
    pairs = mapping(cluster)
    holders = {
        g: [r for r in pairs if g in pairs[r] and _held(cluster, cluster.runs[r]) is not None]
        for g in range(len(cluster.gpus))
    }
    figures: dict[int, Figures] = {}
    everything = _Sums()
    for r, run in enumerate(cluster.runs):
        held, whole = _held(cluster, run), _span(cluster, run)
        if whole is None or (run.gpus == 0 and not pairs[r]):
            continue
        sums = _Sums()
        by_slot: dict[Slot, list[int]] = {}
        for g in pairs[r]:
            by_slot.setdefault(_slot(cluster.gpus[g]), []).append(g)
        for slot_gpus in by_slot.values() if held else ():
            slot_sums = _Sums()
            for g in slot_gpus:
                for counted in _counted(cluster, g, held):
                    _add_gpu(
                        slot_sums,
                        cluster,
                        g,
                        counted,
                        [h for o in holders[g] if (h := _held(cluster, cluster.runs[o]))],
                    )
            _merge(sums, _without_suspended(slot_sums, run.suspended))
        held = whole
        figures[r] = _figures(run.gpus * (held[1] - held[0]) / HOUR_MS, sums)
        if run.gpus == 0:
            shares = {slot: _share_hours(cluster, held, slot_gpus, holders) for slot, slot_gpus in by_slot.items()}
            figures[r] = _figures(sum(shares.values()), sums)
        for kind, figure in KINDS.items():
            slots = {_slot(cluster.gpus[g]) for g, how in pairs[r].items() if how == kind}
            hours = len(slots) * (held[1] - held[0]) / HOUR_MS
            if run.gpus == 0:
                hours = sum(shares[slot] for slot in slots)
            setattr(figures[r], figure, hours)
            figures[r].gpu_hours_unmapped -= hours
        figures[r].gpu_hours_unmapped += figures[r].gpu_hours_allocated
        _merge(everything, sums)
    total = _figures(sum(f.gpu_hours_allocated for f in figures.values()), everything)
    for figure in (*KINDS.values(), "gpu_hours_unmapped"):
        setattr(total, figure, sum(getattr(f, figure) for f in figures.values()))
    if any(_existing(cluster, g) for g in range(len(cluster.gpus))):
        total.gpu_hours_capacity = total.gpu_hours_allocated + _unallocated(cluster, pairs, holders)
    key = {r: (run.job_id, run.submit) for r, run in enumerate(cluster.runs)}
    return Report(
        total,
        {key[r]: f for r, f in figures.items()},
        {key[r]: {cluster.gpus[g].name: how for g, how in pairs[r].items()} for r in figures},
    )


def as_read(cluster: Cluster) -> Cluster:
    """Return the cluster with the times of its runs as a reader of local times without UTC offset has them.

    Of the readings in the order submit, start, end that have the run's duration, it takes the earliest.
    """
    return replace(cluster, runs=[_as_read(run, ZoneInfo(cluster.zone)) if run.plain else run for run in cluster.runs])


def _as_read(run: Run, zone: ZoneInfo) -> Run:
    assert run.end is not None
    moments = [datetime.fromtimestamp(t, UTC).astimezone(zone) for t in (run.submit, run.start, run.end)]
    folds = [sorted({int(m.replace(fold=f).timestamp()) for f in (0, 1)}) for m in moments]
    fitting = [
        reading for reading in itertools.product(*folds)
        if list(reading) == sorted(reading) and abs(reading[2] - reading[1] - (run.end - run.start)) < 900
    ]  # fmt: skip
    submit, start, end = fitting[0]
    doubt = max(max(abs(r[1] - start), abs(r[2] - end)) for r in fitting)
    return replace(run, submit=submit, start=start, end=end, doubt=doubt)


def _identified(cluster: Cluster) -> Cluster:
    """Return the cluster with one GPU for those that sources name differently.

    A GPU without a UUID is the one with a UUID at its PCI address or, without that, at its index, if there is only one:
    on that UTC day or, if there is none on that day, on all of them.
    """
    named = [gpu for gpu in cluster.gpus if gpu.uuid is not None]
    gpus: list[Gpu] = list(named)
    unnamed: dict[tuple[object, ...], list[Gpu]] = {}
    for gpu in (gpu for gpu in cluster.gpus if gpu.uuid is None):
        same = [at for at, other in enumerate(named) if _alike(gpu, other)]
        rest: list[Sample] = []
        for day, samples in itertools.groupby(gpu.samples, key=lambda s: s.time_ms // DAY_MS):
            candidates = [at for at in same if any(s.time_ms // DAY_MS == day for s in named[at].samples)] or same
            if len(candidates) == 1:
                gpus[candidates[0]] = replace(
                    gpus[candidates[0]], samples=_united([*gpus[candidates[0]].samples, *samples])
                )
            else:
                rest += samples
        if rest:
            unnamed.setdefault((gpu.node, gpu.pci, gpu.index, gpu.mig), []).append(replace(gpu, samples=rest))
    # The metrics do not tell GPUs with the same names apart.
    gpus += [
        replace(alike[0], samples=_united([s for gpu in alike for s in gpu.samples])) for alike in unnamed.values()
    ]
    return replace(cluster, gpus=[_placed(gpu, gpus) for gpu in gpus])


def _alike(gpu: Gpu, other: Gpu) -> bool:
    """Return whether a GPU without a UUID may be another one, by its PCI address or, without that, its index."""
    here = (other.node, other.mig) == (gpu.node, gpu.mig)
    return here and (other.pci == gpu.pci if gpu.pci is not None else other.index == gpu.index is not None)


def _placed(gpu: Gpu, gpus: list[Gpu]) -> _Placed:
    """Return the GPU with its place: PCI address, else the only one with its index on the node, else index, else UUID.

    A device that is known only by its index is in the slot of the GPUs with this index.
    """
    same = {o.pci for o in gpus if o.pci and o.index is not None and (o.node, o.index) == (gpu.node, gpu.index)}
    place = gpu.pci or (same.pop() if len(same) == 1 else gpu.index if gpu.index is not None else gpu.uuid)
    return _Placed(gpu.node, gpu.uuid, gpu.pci, gpu.index, gpu.samples, gpu.mig, place)


def _rank(gpu: Gpu) -> int:
    """Return how well a GPU is named."""
    return 2 if gpu.uuid is not None else 1 if gpu.pci is not None else 0


def _lifetime(cluster: Cluster, g: int) -> tuple[float, float] | None:
    """Return the time of the first sample of a GPU, and one sampling interval after the last one."""
    times = _times(cluster, cluster.gpus[g])
    return (min(times), max(times) + (_usual(cluster, g) or 0)) if times else None


def _existing(cluster: Cluster, g: int) -> tuple[float, float] | None:
    """Return when a GPU is known to have existed in the interval."""
    if not (life := _lifetime(cluster, g)):
        return None
    since, until = cluster.since * 1000, cluster.until * 1000
    first, last = life
    reach = MAX_GAP_STEPS * (_usual(cluster, g) or 0)
    first = since if first - since <= reach else max(first, since)
    last = until if until - last <= reach else min(last, until)
    return (first, last) if first < last else None


def _better(cluster: Cluster, g: int) -> dict[int, tuple[float, float]]:
    """Return the better named GPUs in the same slot at the same time, and their lifetimes: they are this GPU."""
    gpu, lifetime = cluster.gpus[g], _lifetime(cluster, g)
    result = {}
    for o, other in enumerate(cluster.gpus):
        if lifetime and _slot(other) == _slot(gpu) and _rank(other) > _rank(gpu):
            life = _lifetime(cluster, o)
            if life and life[0] < lifetime[1] and lifetime[0] < life[1]:
                result[o] = life
    return result


def _counted(cluster: Cluster, g: int, held: tuple[int, int]) -> list[tuple[float, float]]:
    """Return the parts of a time span in which no other GPU of the slot is a better name of this GPU."""
    better = list(_better(cluster, g).values())
    edges = sorted({*held, *(t for life in better for t in life if held[0] < t < held[1])})
    parts: list[tuple[float, float]] = []
    for a, b in itertools.pairwise(edges):
        if any(s <= a and b <= e for s, e in better):
            continue
        if parts and parts[-1][1] == a:
            parts[-1] = (parts[-1][0], b)
        else:
            parts.append((a, b))
    return parts


def _united(samples: list[Sample]) -> list[Sample]:
    """Return the samples in order; of several values at one time, the largest one counts, and all labels do."""
    result: dict[int, Sample] = {}
    for sample in sorted(samples, key=lambda s: s.time_ms):
        if (before := result.get(sample.time_ms)) is None:
            result[sample.time_ms] = sample
            continue
        values = {
            name: max((v for v in (before.values.get(name), sample.values.get(name)) if v is not None), default=None)
            for name in {**before.values, **sample.values}
        }
        result[sample.time_ms] = Sample(sample.time_ms, values, sorted({*before.jobs, *sample.jobs}))
    return list(result.values())


def _without_suspended(sums: _Sums, suspended_s: int) -> _Sums:
    """Return the sums of a GPU of a run without idle time in which the run may have been suspended."""
    idle = sums.hours["idle"]
    moved = min(idle, suspended_s / 3600)
    if not moved:
        return replace(sums, windows=[(a, max(a, b - suspended_s * 1000)) for a, b in sums.windows])
    kept = 1 - moved / idle
    return replace(
        sums, hours={**sums.hours, "idle": idle - moved}, idle_mem=sums.idle_mem * kept,
        idle_energy=sums.idle_energy * kept,
        windows=[(a, max(a, b - suspended_s * 1000)) for a, b in sums.windows] if kept > 0 else [],
    )  # fmt: skip


def _unallocated(cluster: Cluster, pairs: Pairs, holders: dict[int, list[int]]) -> float:
    """Return the hours of GPUs that existed while no run held them, less those of GPUs that were not found."""
    changes: dict[str, list[tuple[float, float]]] = {}
    existed: dict[Slot, list[tuple[float, float]]] = {}
    busy: dict[Slot, list[tuple[int, int]]] = {}
    for g, gpu in enumerate(cluster.gpus):
        busy.setdefault(_slot(gpu), []).extend(h for r in holders[g] if (h := _held(cluster, cluster.runs[r])))
        if span := _existing(cluster, g):
            existed.setdefault(_slot(gpu), []).append(span)
    for slot, spans in existed.items():
        edges = sorted({t for span in [*spans, *busy[slot]] for t in span})
        for a, b in itertools.pairwise(edges):
            exists, taken = (any(s <= a and b <= e for s, e in of) for of in (spans, busy[slot]))
            if exists and not taken:
                changes.setdefault(slot[0], []).extend([(a, 1.0), (b, -1.0)])
    for r, run in enumerate(cluster.runs):
        whole = _span(cluster, run)
        here = {n: len({_slot(cluster.gpus[g]) for g in pairs[r] if cluster.gpus[g].node == n}) for n in run.nodes}
        if whole is None:
            continue
        held = _held(cluster, run) or (whole[1], whole[1])
        # Outside of the time for which it held them for certain, none of its GPUs is found.
        for span, count_of in ((held, here), ((whole[0], held[0]), {}), ((held[1], whole[1]), {})):
            lacking = run.gpus - sum(count_of.values())
            short = {node: max(0.0, run.gpus / len(run.nodes) - count_of.get(node, 0)) for node in run.nodes}
            for node, missing in short.items() if lacking > 0 and span[0] < span[1] else ():
                gpus = lacking * missing / sum(short.values())
                changes.setdefault(node, []).extend([(span[0], -gpus), (span[1], gpus)])
    hours = 0.0
    for of_node in changes.values():
        left, before = 0.0, 0.0
        for time, change in sorted(of_node):
            hours += max(0.0, left) * (time - before) / HOUR_MS
            left, before = left + change, time
    return hours


# --- Samples ----------------------------------------------------------------------------------------------------------


def _add_gpu(sums: _Sums, cluster: Cluster, g: int, held: tuple[float, float], holders: list[tuple[int, int]]) -> None:
    """Add the samples of one GPU to the sums of a run that held it."""
    start, end = held
    window: tuple[float, float] | None = None
    for sample, following in _with_next(cluster.gpus[g].samples):
        if not start <= sample.time_ms < end:
            continue
        until = min(_counts_until(cluster, g, sample, following), end)
        share_ms = sum((b - a) / k for a, b, k in _slices(sample.time_ms, until, holders))
        hours = share_ms / HOUR_MS
        state = _state(sample, cluster.gpus[g])
        if state is not None:
            sums.hours[state] += hours
        if (util := sample.values.get("util_pct")) is not None and cluster.gpus[g].mig is None:
            sums.util += util * hours
            sums.util_hours += hours
        if (mib := sample.values.get("fb_used_mib")) is not None:
            sums.mem = (sums.mem or 0.0) + mib / 1024 * hours
            sums.peak = max(sums.peak or 0.0, mib / 1024)
            sums.idle_mem += mib / 1024 * hours if state == "idle" else 0.0
        if (watts := sample.values.get("power_w")) is not None and cluster.gpus[g].mig is None:
            sums.energy = (sums.energy or 0.0) + watts * hours / 1000
            sums.idle_energy += watts * hours / 1000 if state == "idle" else 0.0
        if window is not None and (state != "idle" or window[1] != sample.time_ms):
            sums.windows.append(window)
            window = None
        if state == "idle":
            window = (window[0] if window else sample.time_ms, until)
    if window is not None:
        sums.windows.append(window)


def _state(sample: Sample, gpu: Gpu) -> str | None:
    """Return idle, low or busy; None without an activity signal. A MIG instance has no utilization."""
    activities = []
    for name, factor in (
        ("util_pct", 1),
        *((n, 100) for n in ("engine_active", "sm_active", "tensor_active", "dram_active")),
    ):
        value = sample.values.get(name)
        if value is not None and not (name == "util_pct" and gpu.mig is not None):
            percent = round(value * factor, 12)
            activities.append(0.0 if percent <= FLOOR_PCT.get(name, 0.0) else percent)
    if not activities:
        return None
    activity = max(activities)
    return "idle" if activity <= IDLE_PCT else "low" if activity <= LOW_PCT else "busy"


def _with_next(samples: list[Sample]) -> Iterator[tuple[Sample, Sample | None]]:
    ordered = sorted(samples, key=lambda s: s.time_ms)
    return zip(ordered, [*ordered[1:], None], strict=True)


def _counts_until(cluster: Cluster, g: int, sample: Sample, following: Sample | None) -> float:
    """Return when the time of a sample ends, ignoring the end of the allocation."""
    step = _step(cluster, g, sample.time_ms // DAY_MS)
    if following is not None and (step is None or following.time_ms - sample.time_ms <= MAX_GAP_STEPS * step):
        return following.time_ms
    return sample.time_ms + (step or 0)


def _step(cluster: Cluster, g: int, day: int) -> float | None:
    """Return the sampling interval of a GPU on a UTC day, in milliseconds."""
    times = [s.time_ms for s in cluster.gpus[g].samples]
    of_day = [t for t in times if t // DAY_MS == day]
    return _typical(of_day) if len(of_day) >= 10 else _usual(cluster, g)


def _usual(cluster: Cluster, g: int) -> float | None:
    """Return the sampling interval of a GPU on the days of the interval."""
    own_step = _own_step(cluster, cluster.gpus[g])
    if own_step is not None and len(_times(cluster, cluster.gpus[g])) >= 3:
        return own_step
    fleet = [_own_step(cluster, gpu) for gpu in cluster.gpus if len(_times(cluster, gpu)) >= 3]
    known = [step for step in fleet if step is not None]
    return median(known) if known else own_step


def _own_step(cluster: Cluster, gpu: Gpu) -> float | None:
    by_day = [list(day) for _, day in itertools.groupby(sorted(_times(cluster, gpu)), key=lambda t: t // DAY_MS)]
    steps = [_typical(day) for day in by_day if len(day) >= 10] or [_typical(day) for day in by_day if len(day) >= 2]
    return median(steps) if steps else None


def _times(cluster: Cluster, gpu: Gpu) -> list[int]:
    return [s.time_ms for s in gpu.samples if _on_its_days(cluster, s)]


def _typical(times: Iterable[int]) -> float:
    """Return the median distance; if two sources alternate, the median of the larger of neighboring distances."""
    ordered = sorted(times)
    distances = [b - a for a, b in itertools.pairwise(ordered)]
    middle = median(distances)
    larger = sorted(max(a, b) for a, b in itertools.pairwise(distances))
    if len(ordered) >= 10 and larger[(len(larger) - 1) // 4] > 3 * middle:
        return median(larger)
    return middle


def _slices(start: float, end: float, holders: list[tuple[int, int]]) -> Iterator[tuple[float, float, int]]:
    """Split a time span at the starts and ends of the runs that hold a GPU: from, to, number of runs."""
    cuts = sorted({start, end, *(t for h in holders for t in h if start < t < end)})
    for a, b in itertools.pairwise(cuts):
        yield a, b, sum(s <= a and b <= e for s, e in holders)


def _share_hours(cluster: Cluster, held: tuple[int, int], slot_gpus: list[int], holders: dict[int, list[int]]) -> float:
    """Return the hours of the GPU in a slot (``slot_gpus``: its names) for a run that shares it with ``holders``.

    Of the names and replacements of the GPU, each counts for the time in which it does not have a better name.
    """
    share = length = 0.0
    for g in slot_gpus:
        others = [h for o in holders[g] if (h := _held(cluster, cluster.runs[o]))]
        for part in _counted(cluster, g, held):
            length += part[1] - part[0]
            share += sum((b - a) / k for a, b, k in _slices(*part, others))
    return share / length * (held[1] - held[0]) / HOUR_MS


def _merge(into: _Sums, sums: _Sums) -> None:
    for state, hours in sums.hours.items():
        into.hours[state] += hours
    into.util += sums.util
    into.util_hours += sums.util_hours
    if sums.mem is not None:
        into.mem = (into.mem or 0.0) + sums.mem
    if sums.peak is not None:
        into.peak = max(into.peak or 0.0, sums.peak)
    into.idle_mem += sums.idle_mem
    if sums.energy is not None:
        into.energy = (into.energy or 0.0) + sums.energy
    into.idle_energy += sums.idle_energy
    into.windows += sums.windows


def _figures(allocated: float, sums: _Sums) -> Figures:
    measured = sum(sums.hours.values())
    known = measured > 0 or allocated == 0
    return Figures(
        gpu_hours_allocated=allocated,
        gpu_hours_measured=measured,
        gpu_hours_unknown=allocated - measured,
        gpu_hours_idle=sums.hours["idle"] if known else None,
        gpu_hours_low=sums.hours["low"] if known else None,
        gpu_hours_busy=sums.hours["busy"] if known else None,
        util_mean_pct=sums.util / sums.util_hours if sums.util_hours else None,
        mem_gib_h=sums.mem,
        idle_mem_gib_h=None if sums.mem is None or measured == 0 else sums.idle_mem,
        fb_peak_gib=sums.peak,
        energy_kwh=sums.energy,
        idle_energy_kwh=None if sums.energy is None or measured == 0 else sums.idle_energy,
        idle_windows=len(sums.windows) if measured > 0 else None,
        longest_idle_s=max((b - a for a, b in sums.windows), default=0) / 1000 if measured > 0 else None,
    )


# --- Which GPU belonged to which run ----------------------------------------------------------------------------------


def mapping(cluster: Cluster) -> Pairs:
    """Map each run to its GPUs: by labels and records, then by whole nodes."""
    pairs, doubtful = _named(cluster)
    for r, run in enumerate(cluster.runs):
        if _held(cluster, run) is None or r in doubtful:
            continue
        names = _record_names(cluster, run)
        slots = {_slot(cluster.gpus[g]) for g in pairs[r]}
        unnamed = [n for n in run.nodes if not names.get(n) and not any(slot[0] == n for slot in slots)]
        left = run.gpus - sum(_named_there(cluster, run, node, slots) for node in run.nodes)
        for node in _whole_nodes(cluster, run, unnamed, left):
            result = [g for g, gpu in enumerate(cluster.gpus) if gpu.node == node and _reaches(cluster, gpu, run)]
            pairs[r] |= dict.fromkeys(result, "whole-node")
    return pairs


def _named(cluster: Cluster) -> tuple[Pairs, set[int]]:
    """Return the GPUs that labels and records assign to each run, and the runs with ambiguous evidence."""
    gpus, runs = cluster.gpus, cluster.runs
    labels = {r: _labelled(cluster, run) for r, run in enumerate(runs)}
    records = {r: _recorded(cluster, run) for r, run in enumerate(runs)}
    named = {r: _least_named(cluster, run) for r, run in enumerate(runs)}
    doubtful: set[int] = set()
    ambiguous = {r for r, run in enumerate(runs) if run.gpus and named[r] > run.gpus}
    for r in ambiguous:
        records[r] = []
    complete = {r for r, run in enumerate(runs) if run.gpus and named[r] == run.gpus}

    def slots(numbers: Iterable[int]) -> set[Slot]:
        return {_slot(gpus[g]) for g in numbers}

    def too_many(r: int, numbers: Iterable[int]) -> bool:
        if not (limit := runs[r].gpus):
            return False
        others = len(runs[r].nodes) - 1
        here = [sum(slot[0] == node for slot in slots(numbers)) for node in runs[r].nodes]
        return sum(here) > limit or max(here) > (limit - others if limit > others else limit)

    many = {r for r in labels if too_many(r, labels[r])}
    for r, labeled in labels.items():
        if r in many and r in complete:
            labels[r] = {}
        elif r not in many and too_many(r, [*labeled, *records[r]]):
            doubtful.add(r)
            both = slots(labeled) & slots(records[r])
            labels[r] = {g: leader for g, leader in labeled.items() if _slot(gpus[g]) in both}
            records[r] = [g for g in records[r] if _slot(gpus[g]) in both]

    def disputed(claims: dict[int, dict[int, bool]]) -> set[tuple[int, int]]:
        return {
            (r, g)
            for r in claims
            for g, leader in claims[r].items()
            if _slot(gpus[g]) not in slots(records[r])
            and any(
                other != r
                and _together(runs[r], runs[other], cluster)
                and (
                    (gpus[g].mig is not None and _slot(gpus[g]) in slots([*claims[other], *records[other]]))
                    or (leader and any(led and _slot(gpus[o]) == _slot(gpus[g]) for o, led in claims[other].items()))
                )
                for other in claims
            )
        }

    open_ = (many - complete) | {r for r, _ in disputed(labels)}
    held = {r: slots([*([] if r in open_ else labels[r]), *records[r]]) for r in labels}
    left = {r: dict(labels[r]) if r in open_ else {} for r in labels}
    for r in open_:
        for g in labels[r]:
            slot = _slot(gpus[g])
            taken = any(o != r and slot in held[o] and _together(runs[r], runs[o], cluster) for o in labels)
            if taken and slot not in slots(records[r]):
                del left[r][g]
    for r in open_:
        if too_many(r, [*left[r], *records[r]]):
            doubtful.add(r)
    still = disputed(left)
    pairs: Pairs = {}
    for r, labeled in labels.items():
        kept = [g for g in left[r] if (r, g) not in still] if r in open_ else list(labeled)
        if r in open_:
            if r in doubtful:
                kept = []
            if len(kept) < len(left[r]) or (runs[r].gpus and len(slots([*kept, *records[r]])) < runs[r].gpus):
                doubtful.add(r)
        pairs[r] = dict.fromkeys(kept, "labels")
        pairs[r] |= {g: "recorded" for g in records[r] if _slot(gpus[g]) not in slots(kept)}
        for g, how in list(pairs[r].items()):
            held_by = _held(cluster, runs[r])
            for other, life in _better(cluster, g).items():
                if held_by and life[0] < held_by[1] and life[1] > held_by[0]:
                    pairs[r].setdefault(other, how)
        if r in ambiguous and len(slots(pairs[r])) < runs[r].gpus:
            doubtful.add(r)
    return pairs, doubtful


def _recorded(cluster: Cluster, run: Run) -> list[int]:
    """Return the GPUs with samples during the run that its records name."""
    names = _record_names(cluster, run)
    return [
        g
        for g, gpu in enumerate(cluster.gpus)
        if names.get(gpu.node, set()) & _names(gpu) and _reaches(cluster, gpu, run)
    ]


def _record_names(cluster: Cluster, run: Run) -> dict[str, set[str]]:
    return {node: {e.gpu for e in _records_of(cluster, run) if e.node == node} for node in run.nodes}


def _least_named(cluster: Cluster, run: Run) -> int:
    """Return how many GPUs the records of a run name at least: two names of a kind are two GPUs."""
    names = [(node, name) for node, gpu_names in _record_names(cluster, run).items() for name in gpu_names]
    kinds = ["pci" if ":" in name else "index" if name.isdecimal() else "uuid" for _, name in names]
    slots = {_slot(cluster.gpus[g]) for g in _recorded(cluster, run)}
    return max(len(slots), *(kinds.count(kind) for kind in ("pci", "index", "uuid")))


def _reaches(cluster: Cluster, gpu: Gpu, run: Run) -> bool:
    """Return whether the samples of the GPU overlap the run."""
    held, times = _held(cluster, run), [s.time_ms for s in gpu.samples if _on_its_days(cluster, s)]
    return held is not None and bool(times) and min(times) < held[1] and max(times) >= held[0]


def _on_its_days(cluster: Cluster, sample: Sample) -> bool:
    """Return whether the sample is on a UTC day of the interval."""
    return cluster.since * 1000 // DAY_MS <= sample.time_ms // DAY_MS <= (cluster.until * 1000 - 1) // DAY_MS


def _seen(cluster: Cluster, gpu: Gpu) -> bool:
    """Return whether the GPU has a sample in the interval or in the seven days before it."""
    return any((cluster.since - LOOK_BACK_S) * 1000 <= s.time_ms < cluster.until * 1000 for s in gpu.samples)


def _named_there(cluster: Cluster, run: Run, node: str, slots: set[Slot]) -> int:
    """Return how many GPUs labels or recorded IDs name on a node (the larger count), including GPUs without samples."""
    names = {entry.gpu for entry in _records_of(cluster, run) if entry.node == node}
    seen = [gpu for gpu in cluster.gpus if gpu.node == node and _seen(cluster, gpu)]
    if run.gpus and _least_named(cluster, run) > run.gpus:
        names = set()
    during = [gpu for gpu in seen if _reaches(cluster, gpu, run)]
    recorded: set[object] = set()
    for name in names:
        # A GPU that earlier had more instances: the name stands for those that the metrics show during the run.
        slots_of = [{_slot(g) for g in some if name in _names(g)} for some in (during, seen)]
        recorded |= slots_of[0] or slots_of[1] or {name}
    return max(len(recorded), sum(slot[0] == node for slot in slots))


def _labelled(cluster: Cluster, run: Run) -> dict[int, bool]:
    """Return the GPUs with labels of the run, on its nodes and during its time, and whether only the leader's ID fits.

    A label is the job ID or, if no job with this ID matches, the ID of its array or heterogeneous job.
    """
    leaders = {of[0] for of in (run.array, run.het) if of} - {run.job_id}
    result: dict[int, bool] = {}
    for g, gpu in enumerate(cluster.gpus):
        own_spans = [span for span in _label_spans(gpu, run.job_id) if _fits(cluster, run, gpu, span)]
        spans = list(own_spans)
        for leader in leaders:
            jobs = [other for other in cluster.runs if other.job_id == leader]
            spans += [
                span
                for span in _label_spans(gpu, leader)
                if _fits(cluster, run, gpu, span) and not any(_fits(cluster, job, gpu, span) for job in jobs)
            ]
        if spans and _reaches(cluster, gpu, run):
            result[g] = not own_spans
    return result


def _fits(cluster: Cluster, run: Run, gpu: Gpu, span: tuple[int, int]) -> bool:
    held = _held(cluster, run)
    return gpu.node in run.nodes and held is not None and span[0] < held[1] and span[1] >= held[0]


def _label_spans(gpu: Gpu, job_id: int) -> Iterator[tuple[int, int]]:
    """Return first and last time of consecutive samples with the label."""
    ordered = sorted(gpu.samples, key=lambda s: s.time_ms)
    for labelled, samples in itertools.groupby(ordered, key=lambda s: job_id in s.jobs):
        times = [s.time_ms for s in samples]
        if labelled:
            yield times[0], times[-1]


def _records_of(cluster: Cluster, run: Run) -> list[Recorded]:
    """Return the records of a run; those without a start count only if it is the job's only run."""
    once = sum(other.job_id == run.job_id for other in cluster.runs) == 1
    starts = (None, run.start) if once else (run.start,)
    return [e for e in cluster.recorded if e.job_id == run.job_id and e.start in starts and e.node in run.nodes]


def _whole_nodes(cluster: Cluster, run: Run, unnamed: list[str], left: int) -> list[str]:
    """Return the nodes whose GPUs all belong to the run; ``left`` of its GPUs are not mapped by other evidence."""
    if left <= 0 or not unnamed:
        return []
    counts = {node: _gpu_count(cluster, node) for node in unnamed}
    known = [c for c in counts.values() if c is not None]
    everywhere = len(known) == len(unnamed) and sum(known) == left
    even = left // len(unnamed) if left % len(unnamed) == 0 else None
    others = [o for o in cluster.runs if o is not run and _perhaps_together(o, run, cluster)]
    alone = [n for n in unnamed if not any(n in o.nodes and _with_gpus(cluster, o) for o in others)]
    everywhere = everywhere and alone == unnamed
    return [n for n in alone if counts[n] and (everywhere or counts[n] == even)]


def _with_gpus(cluster: Cluster, run: Run) -> bool:
    """Return whether a run has GPUs: by accounting, a label or a recorded ID."""
    return run.gpus > 0 or bool(_labelled(cluster, run) or _records_of(cluster, run) or _perhaps_labelled(cluster, run))


def _perhaps_labelled(cluster: Cluster, run: Run) -> bool:
    """Return whether a run in a repeated hour has a label in the time in which it may have run."""
    span = _span(cluster, run)
    if not (span and run.doubt):
        return False
    longer = replace(run, end=(run.end or 0) + run.doubt, doubt=0)
    other = replace(cluster, runs=[longer if item is run else item for item in cluster.runs])
    return bool(_labelled(other, longer))


def _gpu_count(cluster: Cluster, node: str) -> int | None:
    """Return how many GPUs the node has; None if unknown."""
    seen = [g for g in cluster.gpus if g.node == node and _seen(cluster, g)]
    slots = {_slot(gpu) for gpu in seen}
    if any(gpu.index is not None and gpu.index >= len(slots) for gpu in seen):
        return None
    single = [r for r in cluster.runs if r.nodes == [node] and _held(cluster, r) is not None]
    for run in single:
        # The maximum in use at a time is reached at the start of a run.
        start, _ = _held(cluster, run) or (0, 0)
        if sum(o.gpus for o in single if (h := _held(cluster, o)) and h[0] <= start < h[1]) > len(slots):
            return None
    jobs = {r.job_id for r in cluster.runs if _held(cluster, r)}
    recorded = {e.gpu for e in cluster.recorded if e.node == node and e.job_id in jobs}
    distinct = {next((_slot(g) for g in seen if name in _names(g)), name) for name in recorded}
    if len(distinct) > len(slots) or any(name.isdecimal() and int(name) >= len(slots) for name in recorded):
        return None
    return len(slots)


def _slot(gpu: Gpu) -> Slot:
    assert isinstance(gpu, _Placed)
    return gpu.node, gpu.place, gpu.mig


def _names(gpu: Gpu) -> set[str]:
    return {str(name) for name in (gpu.uuid, gpu.pci, gpu.index) if name is not None}


def _span(cluster: Cluster, run: Run) -> tuple[int, int] | None:
    """Return when the run had GPUs within the interval according to accounting, in milliseconds."""
    start = max(run.start, cluster.since)
    end = min(min(_known_until(cluster), cluster.now) if run.end is None else run.end, cluster.until)
    return (start * 1000, end * 1000) if start < end else None


def _held(cluster: Cluster, run: Run) -> tuple[int, int] | None:
    """Return when the run held its GPUs within the interval for certain.

    Slurm has lost a job that runs long after its limit. A run in a repeated hour may have started later.
    """
    span = _span(cluster, run)
    if span and run.doubt:
        span = max(span[0], (run.start + run.doubt) * 1000), span[1]
        span = span if span[0] < span[1] else None
    if span is None or run.end is not None or run.limit is None:
        return span
    ran = cluster.accounted - run.start - run.suspended
    if ran <= run.limit + max(run.limit, 86_400):
        return span
    end = min(span[1], (run.start + run.limit) * 1000)
    return (span[0], end) if span[0] < end else None


def _known_until(cluster: Cluster) -> int:
    """Return the latest time in accounting; a running job counts until its start plus elapsed time."""
    ran = [cluster.accounted if run.end is None else run.end for run in cluster.runs]
    return max(*ran, *(run.start for run in cluster.runs), *(run.submit for run in cluster.runs))


def _together(first: Run, other: Run, cluster: Cluster) -> bool:
    return _overlap(_held(cluster, first), _held(cluster, other))


def _perhaps_together(first: Run, other: Run, cluster: Cluster) -> bool:
    """Return whether two runs may have held GPUs at the same time."""
    spans = []
    for run in (first, other):
        span = _span(cluster, run)
        spans.append((span[0], span[1] + run.doubt * 1000) if span and run.doubt else _held(cluster, run))
    return _overlap(*spans)


def _overlap(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    return a is not None and b is not None and max(a[0], b[0]) < min(a[1], b[1])
