"""The sample schema, which all readers of GPU metrics produce.

A sample holds the values that one source measured for one GPU (or one MIG instance) at one time. ``None`` is not
measured; 0 is a measurement. Ratios of activity are 0-1 as in DCGM's profiling fields, utilization is 0-100 as in NVML.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from slurm_affinode.model.gpu import FIELDS, floor_of

TIME = pl.Datetime("ms", "UTC")

IDENTITY: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "node": pl.String(),  # short host name, as Slurm names nodes
    "uuid": pl.String(),  # "GPU-...", of the physical GPU also for a MIG instance
    "pci": pl.String(),  # "00000000:E1:00.0", upper case, eight-digit domain
    "index": pl.Int16(),  # on the node, as numbered by the source; never an identity if a UUID is known
    "mig": pl.String(),  # MIG GPU instance id, None for a whole GPU
    "mig_profile": pl.String(),  # "1g.10gb"
    "model": pl.String(),  # "NVIDIA A100-SXM4-80GB"
}

METRICS: dict[str, pl.DataType] = {
    "util_pct": pl.Float32(),  # 0-100, share of time in which a kernel ran (NVML utilization.gpu)
    "engine_active": pl.Float32(),  # 0-1, graphics/compute engine active
    "sm_active": pl.Float32(),  # 0-1, SM cycles with a warp
    "tensor_active": pl.Float32(),  # 0-1, tensor pipe active
    "dram_active": pl.Float32(),  # 0-1, device memory interface active
    "fb_used_mib": pl.Float32(),  # framebuffer, MiB
    "fb_total_mib": pl.Float32(),
    "power_w": pl.Float32(),
    "xid": pl.Int32(),  # the last XID error; 0 none
}

SAMPLES: dict[str, pl.DataType] = {
    **IDENTITY,
    "time": TIME,
    **METRICS,
    "job": pl.String(),  # ids of the jobs that hold the GPU per the source, sorted, joined by ","; None: unknown
}

ACTIVITY = ("util_pct", "engine_active", "sm_active", "tensor_active", "dram_active")
"""The activity signals. ``util_pct`` is in percent; the others are ratios and are multiplied by 100 to compare."""


def percent(name: str, floors_pct: Mapping[str, float]) -> pl.Expr:
    """Return an activity signal in percent; 0 where it is at or below its floor."""
    value, scale = pl.col(name), FIELDS[name][1]
    scaled = value if scale == 1 else value * scale
    floor = floor_of(name, floors_pct)
    if floor <= 0:
        return scaled
    return pl.when(value <= pl.lit(floor, pl.Float32)).then(pl.lit(0.0, pl.Float32)).otherwise(scaled).alias(name)


def busiest(floors_pct: Mapping[str, float]) -> pl.Expr:
    """Return the largest of the activity signals of a sample, in percent; null if it has none."""
    return pl.max_horizontal(percent(name, floors_pct) for name in ACTIVITY)
