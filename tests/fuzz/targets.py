"""All targets, by name."""

from __future__ import annotations

from fuzz import (
    control,
    engines,
    exporter,
    images,
    native,
    node_files,
    procfs,
    records,
    shepherds,
    slurm,
    snapshots,
    task_results,
)  # fmt: skip
from fuzz.runner import Target

_PARTS = (
    shepherds, control, images, procfs, records, node_files, slurm, engines, exporter, snapshots, native, task_results,
)  # fmt: skip
TARGETS: dict[str, Target] = {target.name: target for part in _PARTS for target in part.TARGETS}
