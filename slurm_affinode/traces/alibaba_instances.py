"""Readers of Alibaba's traces of instances: recommendation models (2025), and pods that share GPUs (2023).

DLRM (``cluster-trace-gpu-v2025``): one CSV file, one line per instance of a service. Times are seconds from the start
of the trace; an empty creation or scheduling time is before it, an empty deletion time after its end.

PAI (``cluster-trace-gpu-v2023``): lists of pods and nodes. Requests are in thousandths of a CPU or GPU (``gpu_milli``
of each of ``num_gpu`` GPUs). A pod that is Pending has not been scheduled. The deletion time of a pod that is Pending
or Running is when it was last seen.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.traces import csv_columns
from slurm_affinode.traces.instances import INSTANCES, InstanceLog

DLRM_FILE = "disaggregated_DLRM_trace.csv"
PAI_PODS, PAI_NODES = "openb_pod_list_default.csv", "openb_node_list_all_node.csv"
ROLES = ("CN", "HN")
"""CPU node, and heterogeneous node with a GPU."""
PHASES = ("Succeeded", "Failed", "Running", "Pending")
_DLRM, _PAI = "the DLRM trace of 2025", "the shared-GPU trace of 2023"
_DLRM_NUMBERS = (
    "cpu_request", "gpu_request", "memory_request", "creation_time", "scheduled_time", "deletion_time",
)  # fmt: skip
_DLRM_TYPES = {"role": pl.String(), "app_name": pl.String(), **dict.fromkeys(_DLRM_NUMBERS, pl.Float64())}
_PAI_NUMBERS = (
    "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time",
)  # fmt: skip
_PAI_TYPES = {"pod_phase": pl.String(), "gpu_spec": pl.String(), **dict.fromkeys(_PAI_NUMBERS, pl.Float64())}
_PAI_NODE_TYPES = {"gpu": pl.Float64(), "model": pl.String()}


def read_dlrm2025(path: Path) -> InstanceLog:
    """Read the DLRM trace of 2025: its file, or the one in a directory.

    Raises ``InputError`` if it is not the file of this trace.
    """
    file = csv_columns.located(path, DLRM_FILE, trace=_DLRM)
    rows = csv_columns.read(file, _DLRM_TYPES, trace=_DLRM)
    unknown = rows.filter(~pl.col("role").is_in(ROLES) | pl.col("role").is_null())
    if unknown.height:
        role = one_line(unknown["role"][0] or "(none)", 40)
        raise InputError(f"role {role} is unknown: CN and HN are read", where=f"{file}:{unknown['line'][0]}")
    before, after = pl.col("creation_time").is_null(), pl.col("deletion_time").is_null()
    state = (
        pl.when(before & after).then(pl.lit("whole trace"))
        .when(before).then(pl.lit("began before"))
        .when(after).then(pl.lit("continues after"))
        .otherwise(pl.lit("within the trace"))
    )  # fmt: skip
    instances = rows.select(
        group=pl.col("role"), state=state, service=pl.col("app_name"), created_s=pl.col("creation_time"),
        scheduled_s=pl.col("scheduled_time"), deleted_s=pl.col("deletion_time"), ended=~after,
        cpus=pl.col("cpu_request"), memory_gib=pl.col("memory_request"), gpus=pl.col("gpu_request"),
    )  # fmt: skip
    return InstanceLog(str(file), instances.cast(INSTANCES), {})  # type: ignore[arg-type]


def read_pai2023(path: Path) -> InstanceLog:
    """Read the shared-GPU trace of 2023: a list of pods, or the default one in a directory.

    The list of nodes in the same directory is read if there is one.

    Raises ``InputError`` if a file is not of this trace.
    """
    file = csv_columns.located(path, PAI_PODS, trace=_PAI)
    rows = csv_columns.read(file, _PAI_TYPES, trace=_PAI)
    phase = pl.col("pod_phase")
    unknown = rows.filter(~phase.is_in(PHASES) | phase.is_null())
    if unknown.height:
        text = one_line(unknown["pod_phase"][0] or "(none)", 40)
        raise InputError(f"phase {text} is unknown: {', '.join(PHASES)} are read", where=f"{file}:{unknown['line'][0]}")
    gpus = pl.col("num_gpu") * pl.col("gpu_milli") / 1000
    kind = (
        pl.when(gpus == 0).then(pl.lit("no-gpu"))
        .when(gpus < 1).then(pl.lit("part-of-a-gpu"))
        .when(gpus == 1).then(pl.lit("one-gpu"))
        .otherwise(pl.lit("several-gpus"))
    )  # fmt: skip
    pods = rows.select(
        group=kind, state=phase, service=pl.lit(None, pl.String()), created_s=pl.col("creation_time"),
        scheduled_s=pl.col("scheduled_time"), deleted_s=pl.col("deletion_time"),
        ended=phase.is_in(["Succeeded", "Failed"]), cpus=pl.col("cpu_milli") / 1000,
        memory_gib=pl.col("memory_mib") / 1024, gpus=gpus,
    )  # fmt: skip
    constrained = int(rows["gpu_spec"].is_not_null().sum())
    return InstanceLog(str(file), pods.cast(INSTANCES), _nodes(file.parent), constrained)  # type: ignore[arg-type]


def _nodes(directory: Path) -> dict[str, int]:
    """Return the GPUs by model; empty without a list of nodes."""
    file = csv_columns.inside(directory, PAI_NODES)
    if file is None:
        return {}
    nodes = csv_columns.read(file, _PAI_NODE_TYPES, trace=_PAI).filter(pl.col("gpu") > 0)
    models = nodes.group_by(pl.col("model").fill_null("unknown")).agg(pl.col("gpu").sum().cast(pl.Int64))
    return dict(models.sort("gpu", "model", descending=[True, False]).iter_rows())
