"""Capacity: the time for which GPUs are known to have existed, and the part of it that no run held.

The rule is ``capacity`` in ``docs/metrics.md``.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from slurm_affinode.analysis.segments import Cells, Floats, Ints

_NOTHING = 1e-6
"""GPUs: less is the rounding of a sum of fractions."""

Spans = tuple[Ints, Ints, Ints, Floats]
"""Place, start and end (ms), and number of GPUs (negative: taken), as columns."""


def not_allocated_ms(cells: Cells, devices: pl.DataFrame, lacking: pl.DataFrame, *, max_gap_steps: float) -> float:
    """GPU time, ms, in which GPUs are known to have existed and no run held them.

    ``devices``: as ``samples.Index.devices``, in the order of the cells. ``lacking``: GPUs of runs that are mapped to
    no device: ``cluster``, ``node`` (None: it is not known where), ``gpus``, ``start_ms``, ``end_ms``. They are taken
    to be GPUs of that node, or of the cluster, that no other run is known to have held, as far as there are any.
    """
    device, start, end = _free(cells, devices, max_gap_steps)
    if lacking.is_empty():
        return float((end - start).sum())
    both = pl.concat([devices.select("cluster", "node"), lacking.select("cluster", "node")])
    node, cluster = (
        both.select(pl.struct(by).rank("dense").cast(pl.Int64)).to_series().to_numpy()
        for by in (["cluster", "node"], ["cluster"])
    )
    of_run = np.arange(devices.height, both.height)
    placed = lacking["node"].is_not_null().to_numpy()
    taken = tuple(lacking[name].to_numpy() for name in ("start_ms", "end_ms"))
    gpus = -lacking["gpus"].to_numpy().astype(np.float64)
    left = _left(
        (node[device], start, end, np.ones(len(device))),
        (node[of_run][placed], taken[0][placed], taken[1][placed], gpus[placed]),
    )
    if not placed.all():
        cluster_of = np.zeros(int(node.max()) + 1, np.int64)
        cluster_of[node] = cluster
        left = _left(
            (cluster_of[left[0]], *left[1:]),
            (cluster[of_run][~placed], taken[0][~placed], taken[1][~placed], gpus[~placed]),
        )
    return float(((left[2] - left[1]) * left[3]).sum())


def _free(cells: Cells, devices: pl.DataFrame, max_gap_steps: float) -> tuple[Ints, Ints, Ints]:
    """Device, start and end of the spans in which a device is known to have existed and no run held it."""
    free = np.flatnonzero(cells.inside & (cells.sharers == 0))
    device, start, end = cells.device[free], cells.start[free], cells.end[free]
    new = np.ones(len(free), np.bool_)
    new[1:] = (device[1:] != device[:-1]) | (start[1:] != end[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(free)) - 1 if len(first) else first
    device, start, end = device[first], start[first], end[last]
    # From its first sample to its last, and to a border of the interval that is no gap away.
    step = devices["step_ms"].to_numpy()
    seen = devices["first"].dt.epoch("ms").to_numpy()
    gone = devices["last"].dt.epoch("ms").to_numpy() + step
    near = np.ceil(step * max_gap_steps).astype(np.int64)
    seen = np.where(seen - cells.since <= near, cells.since, seen)
    gone = np.where(cells.until - gone <= near, cells.until, gone)
    start, end = np.maximum(start, seen[device]), np.minimum(end, gone[device])
    there = end > start
    return device[there], start[there], end[there]


def _left(free: Spans, taken: Spans) -> Spans:
    """Where of ``free`` more is there than ``taken``, and how much more."""
    place, start, end, gpus = (np.concatenate([a, b]) for a, b in zip(free, taken, strict=True))
    at, time, change = np.concatenate([place, place]), np.concatenate([start, end]), np.concatenate([gpus, -gpus])
    order = np.lexsort((time, at))
    at, time, net = at[order], time[order], np.cumsum(change[order])
    keep = (at[1:] == at[:-1]) & (time[1:] > time[:-1]) & (net[:-1] > _NOTHING)
    return at[:-1][keep], time[:-1][keep], time[1:][keep], net[:-1][keep]
