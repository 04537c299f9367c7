"""The synthetic runs as ``sacct --parsable2`` would print them, UTC, with the batch step of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from slurm_affinode.demo.schedule import Run

FIELDS = (
    "Cluster", "JobIDRaw", "JobID", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Submit", "Eligible",
    "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NodeList", "NCPUS", "ReqMem", "ReqTRES", "AllocTRES",
    "MaxRSS", "JobName",
)  # fmt: skip
CPUS_PER_GPU = 12
MEM_PER_GPU_G = 120
_EXIT = {"FAILED": "1:0", "OUT_OF_MEMORY": "0:125", "TIMEOUT": "0:0"}


def sacct_lines(runs: Sequence[Run], *, start: datetime, horizon_s: int, cluster: str = "demo") -> Iterable[str]:
    """Yield the header and the records, one line each, without newline."""
    yield "|".join(FIELDS)
    for run in runs:
        yield from _records(run, start, horizon_s, cluster)


def _records(run: Run, start: datetime, horizon_s: int, cluster: str) -> Iterable[str]:
    def at(seconds: int | None) -> str:
        return "Unknown" if seconds is None else (start + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")

    gpus = len(run.gpus)
    cpus, mem_g = gpus * CPUS_PER_GPU, gpus * MEM_PER_GPU_G
    tres = f"cpu={cpus},mem={mem_g}G,node=1"
    gres = f"gres/gpu:{run.node.gres}={gpus},gres/gpu={gpus}"
    elapsed = (horizon_s if run.end_s is None else run.end_s) - run.start_s
    exit_code = _EXIT.get(run.state, "0:0")
    shared = [
        run.state, exit_code, at(run.submit_s), at(run.submit_s), at(run.start_s), at(run.end_s), str(elapsed),
    ]  # fmt: skip
    yield "|".join(
        [
            cluster, str(run.job_id), str(run.job_id), run.user, run.account, run.node.partition, run.kind.qos, *shared,
            str(run.timelimit_s // 60), "1", run.node.name, str(cpus), f"{mem_g}G",
            f"billing={cpus},{tres},{gres}", f"billing={cpus},{tres},{gres}", "", run.job_name,
        ]
    )  # fmt: skip
    step_state = "CANCELLED" if run.state == "TIMEOUT" else run.state.split()[0]
    step = f"{run.job_id}.batch"
    began = at(run.start_s)
    yield "|".join(
        [
            cluster, step, step, "", run.account, "", "", step_state, exit_code, began, began, began, at(run.end_s),
            str(elapsed), "", "1", run.node.name, str(cpus), "", "", f"{tres},{gres}",
            f"{gpus * 14 * 1024 * 1024 + run.job_id % 977}K", "batch",
        ]
    )  # fmt: skip
