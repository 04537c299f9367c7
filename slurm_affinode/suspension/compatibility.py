"""The rows of ``docs/compatibility.md`` that apply to a job, and whether it can be suspended now in each mode."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_affinode.checkpoint.inspection import ProcessFacts, TreeFacts, forked_workers
from slurm_affinode.model.suspension import Mode, Refusal, RefusalCode, Steps
from slurm_affinode.suspension.job.registry import WatchedJob


class CompatibilityRow(StrEnum):
    """A way to start a job, as the table calls it."""

    BATCH = "batch script"
    ARRAY = "job array"
    SEVERAL_GPUS = "several GPUs, several processes"
    SHARDS = "shards of a GPU"
    DATA_LOADER = "data loader with workers (fork, forkserver, spawn)"
    LOCAL_STEPS = "srun in the script, steps=local"
    STEPS = "srun in the script"
    TORCHRUN = "torchrun, accelerate launch"
    MPI = "MPI on one node (mpirun in the script)"
    RAY = "Ray on one node"
    NOTEBOOK = "notebook server (Jupyter)"
    EDITOR = "VS Code server (code-server)"
    TERMINAL = "terminal (tmux) in a batch job"
    SERVICE = "program with a connection to SSSD, nslcd or nscd"
    MONITOR = "monitor, or another program that opens GPU devices without CUDA"
    CONTAINER = "container of the user (Apptainer, Charliecloud, enroot)"
    MIG = "MIG instance"
    MPS = "MPS"
    HETEROGENEOUS = "heterogeneous job"
    SEVERAL_NODES = "several nodes"


_BY_CODE = {
    RefusalCode.SRUN_STEPS: CompatibilityRow.STEPS,
    RefusalCode.GPU_FILE: CompatibilityRow.MONITOR,
    RefusalCode.NAMESPACES: CompatibilityRow.CONTAINER,
    RefusalCode.MIG: CompatibilityRow.MIG,
    RefusalCode.MPS: CompatibilityRow.MPS,
    RefusalCode.HETEROGENEOUS: CompatibilityRow.HETEROGENEOUS,
    RefusalCode.MULTI_NODE: CompatibilityRow.SEVERAL_NODES,
}
_BY_NAME = {
    "torchrun": CompatibilityRow.TORCHRUN,
    "pt_elastic": CompatibilityRow.TORCHRUN,  # the name that PyTorch gives to both launchers
    "accelerate": CompatibilityRow.TORCHRUN,
    "mpirun": CompatibilityRow.MPI,
    "mpiexec": CompatibilityRow.MPI,
    "orterun": CompatibilityRow.MPI,
    "prterun": CompatibilityRow.MPI,  # the name that Open MPI 5 gives to mpirun
    "raylet": CompatibilityRow.RAY,
    "jupyter": CompatibilityRow.NOTEBOOK,
    "tmux": CompatibilityRow.TERMINAL,
}
"""Beginning of the name of a process, or of the script or module that its Python runs -> kind."""
_BY_MODULE = {"notebook": CompatibilityRow.NOTEBOOK, "nbclassic": CompatibilityRow.NOTEBOOK}
"""Name of a Python package that runs as a program -> kind."""
_EDITOR = re.compile(r"(.*/)?(code-server(/.*)?|server-main\.js)")
"""Program that Node.js runs as code-server, or as the server that Microsoft distributes."""
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_WITH_VALUE = "WX"
"""Options of Python with a value."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Which jobs it is one of, and what prevents its suspension."""

    kinds: tuple[CompatibilityRow, ...]
    modes: Mapping[Mode, Sequence[Refusal]]
    """Refusals of a suspension now, by mode; empty: it can be suspended."""


def kinds(
    job: WatchedJob, tree: TreeFacts | None, cuda_users: Collection[int], codes: Collection[str]
) -> tuple[CompatibilityRow, ...]:
    """Return the kinds of a watched job, in the order of the table.

    ``tree``: its processes, ``None`` if they are unknown. ``codes``: those of its refusals, in any mode.
    """
    rows = {CompatibilityRow.BATCH, *(kind for code, kind in _BY_CODE.items() if code in codes)}
    if job.slurm is not None and job.slurm.array_job_id is not None:
        rows.add(CompatibilityRow.ARRAY)
    if job.slurm is not None and any(name.startswith("gres/shard") for name in job.slurm.tres_allocated):
        rows.add(CompatibilityRow.SHARDS)
    if len(job.devices or ()) > 1 or len(cuda_users) > 1:
        rows.add(CompatibilityRow.SEVERAL_GPUS)
    if job.option.steps is Steps.LOCAL:
        rows.add(CompatibilityRow.LOCAL_STEPS)
    if tree is not None:
        if forked_workers(tree, cuda_users):
            rows.add(CompatibilityRow.DATA_LOADER)
        if any(process.services for process in tree.processes):
            rows.add(CompatibilityRow.SERVICE)
        for process in tree.processes:
            rows |= set(_by_names(process))
    return tuple(kind for kind in CompatibilityRow if kind in rows)


def _by_names(process: ProcessFacts) -> Iterator[CompatibilityRow]:
    """Yield the kinds that the name or the command line of a process shows."""
    script, module = _python_program(process.arguments)
    package = module.partition(".")[0]
    if package in _BY_MODULE:
        yield _BY_MODULE[package]
    if any(map(_EDITOR.fullmatch, process.arguments[:2])):
        yield CompatibilityRow.EDITOR
    for start, kind in _BY_NAME.items():
        if any(name.startswith(start) for name in (process.name, script, package)):
            yield kind


def _python_program(arguments: Sequence[str]) -> tuple[str, str]:
    """Return the name of the script, and the name of the module, that a command line of Python runs; or empty names.

    The names of the processes are ``python`` then: ``python3 -m jupyterlab``, ``python3 /opt/bin/jupyter-lab``.
    """
    if not arguments or not _PYTHON.fullmatch(arguments[0]):
        return "", ""
    rest = iter(arguments[1:])
    for word in rest:
        if not word.startswith("-"):
            return word.rpartition("/")[2], ""
        if word.startswith("--"):
            continue
        for index, letter in enumerate(word[1:], 2):
            if letter == "c":
                return "", ""
            if letter == "m":
                return "", word[index:] or next(rest, "")
            if letter in _WITH_VALUE:
                if not word[index:]:
                    next(rest, "")
                break
    return "", ""
