"""The one sample schema: what every reader of GPU history produces.

A sample is what one source said about one GPU (or one MIG instance) at one time. Missing is ``None``; 0 is a
measurement. Fractions of activity are 0-1 as DCGM's profiling fields give them, utilization is 0-100 as NVML gives it.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from slurm_affinode.model.signals import FIELDS, floor_of

TIME = pl.Datetime("ms", "UTC")

IDENTITY: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "node": pl.String(),  # short host name, as Slurm names nodes
    "uuid": pl.String(),  # "GPU-...", of the physical GPU also for a MIG instance
    "pci": pl.String(),  # "00000000:E1:00.0", upper case, eight-digit domain
    "index": pl.Int16(),  # on the node, as the source counted; a hint, never an identity where a UUID is known
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
    "job": pl.String(),  # ids of the jobs that the source says hold the GPU, sorted, joined by ","; None: not said
}

ACTIVITY = ("util_pct", "engine_active", "sm_active", "tensor_active", "dram_active")
"""The activity signals. ``util_pct`` is percent; the others are fractions and are multiplied by 100 to compare."""


def percent(name: str, floors_pct: Mapping[str, float]) -> pl.Expr:
    """An activity signal in percent; 0 where it is at or below its floor."""
    value, scale = pl.col(name), FIELDS[name][1]
    scaled = value if scale == 1 else value * scale
    floor = floor_of(name, floors_pct)
    if floor <= 0:
        return scaled
    return pl.when(value <= pl.lit(floor, pl.Float32)).then(pl.lit(0.0, pl.Float32)).otherwise(scaled).alias(name)


def busiest(floors_pct: Mapping[str, float]) -> pl.Expr:
    """The largest of the activity signals of a sample, in percent; null where it has none."""
    return pl.max_horizontal(percent(name, floors_pct) for name in ACTIVITY)
