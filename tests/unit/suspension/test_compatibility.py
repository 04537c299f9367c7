"""The kinds of a job, from Slurm's record, its processes and its refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_affinode.checkpoint.files.service_connections import ServiceConnection
from slurm_affinode.checkpoint.inspection import ProcessFacts, TreeFacts
from slurm_affinode.model.suspension import Steps, SuspendOption
from slurm_affinode.suspension.compatibility import CompatibilityRow, kinds
from slurm_affinode.suspension.job.registry import WatchedJob

SCRIPT = ProcessFacts(100, "slurm_script", (1001,) * 4)
PROGRAM = ProcessFacts(101, "python", (1001,) * 4, files=("/dev/nvidia0",))
SSSD = ServiceConnection(71234, "/var/lib/sss/pipes/nss", busy=False)
TREE = TreeFacts(99, 100, (SCRIPT, PROGRAM))
SLURM = SimpleNamespace(array_job_id=None, tres_allocated={"cpu": "1", "gres/gpu": "1"})
JOB = WatchedJob(7, 1001, 1001, 0, SuspendOption(), 99, 1, 2, SimpleNamespace(), 0.0, slurm=SLURM)  # type: ignore[arg-type]


def check_image(
    *,
    job: dict[str, Any] | None = None,
    slurm: dict[str, Any] | None = None,
    more: ProcessFacts | None = None,
    users: tuple[int, ...] = (101,),
    codes: tuple[str, ...] = (),
) -> tuple[CompatibilityRow, ...]:
    """Return the kinds of a job besides ``BATCH``, which every watched job is."""
    record = SimpleNamespace(**{**vars(SLURM), **(slurm or {})})
    watched = replace(JOB, slurm=record, **(job or {}))  # type: ignore[arg-type]
    tree = TREE if more is None else replace(TREE, processes=(*TREE.processes, more))
    first, *rest = kinds(watched, tree, users, codes)
    assert first is CompatibilityRow.BATCH
    return tuple(rest)


def test_plain_job_is_a_batch_script() -> None:
    assert check_image() == ()
    assert kinds(replace(JOB, slurm=None), None, (), ()) == (CompatibilityRow.BATCH,)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"slurm": {"array_job_id": 5}}, CompatibilityRow.ARRAY),
        ({"job": {"devices": (SimpleNamespace(), SimpleNamespace())}}, CompatibilityRow.SEVERAL_GPUS),
        ({"users": (101, 102)}, CompatibilityRow.SEVERAL_GPUS),
        ({"slurm": {"tres_allocated": {"gres/shard": "6"}}}, CompatibilityRow.SHARDS),
        ({"more": replace(PROGRAM, pid=102, heir_of=(101,))}, CompatibilityRow.DATA_LOADER),
        ({"job": {"option": SuspendOption(steps=Steps.LOCAL)}}, CompatibilityRow.LOCAL_STEPS),
        ({"codes": ("srun-steps",)}, CompatibilityRow.STEPS),
        ({"more": replace(SCRIPT, pid=102, services=(SSSD,))}, CompatibilityRow.SERVICE),
        ({"more": replace(SCRIPT, pid=102, name="torchrun")}, CompatibilityRow.TORCHRUN),
        ({"more": replace(SCRIPT, pid=102, name="pt_elastic")}, CompatibilityRow.TORCHRUN),
        ({"more": replace(SCRIPT, pid=102, name="accelerate")}, CompatibilityRow.TORCHRUN),
        ({"more": replace(SCRIPT, pid=102, name="mpirun")}, CompatibilityRow.MPI),
        ({"more": replace(SCRIPT, pid=102, name="mpiexec.hydra")}, CompatibilityRow.MPI),
        ({"more": replace(SCRIPT, pid=102, name="prterun")}, CompatibilityRow.MPI),
        ({"more": replace(SCRIPT, pid=102, name="raylet")}, CompatibilityRow.RAY),
        ({"more": replace(SCRIPT, pid=102, name="jupyter-lab")}, CompatibilityRow.NOTEBOOK),
        ({"more": replace(SCRIPT, pid=102, name="tmux: server")}, CompatibilityRow.TERMINAL),
        ({"codes": ("gpu-file",)}, CompatibilityRow.MONITOR),
        ({"codes": ("namespaces",)}, CompatibilityRow.CONTAINER),
        ({"codes": ("mig",)}, CompatibilityRow.MIG),
        ({"codes": ("mps",)}, CompatibilityRow.MPS),
        ({"codes": ("heterogeneous",)}, CompatibilityRow.HETEROGENEOUS),
        ({"codes": ("multi-node",)}, CompatibilityRow.SEVERAL_NODES),
    ],
)
def test_kind_is_named(facts: dict[str, Any], kind: CompatibilityRow) -> None:
    """No other kind is named."""
    assert check_image(**facts) == (kind,)


def python(command: str) -> ProcessFacts:
    """Return the facts about a process of Python with this command line."""
    return replace(SCRIPT, pid=102, name="python3", arguments=tuple(command.split()))


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python -m jupyter_server", CompatibilityRow.NOTEBOOK),
        ("python3 -m jupyterlab --no-browser", CompatibilityRow.NOTEBOOK),
        ("/opt/env/bin/python3.13 -m notebook", CompatibilityRow.NOTEBOOK),
        ("python -m jupyter lab", CompatibilityRow.NOTEBOOK),
        ("python -m nbclassic", CompatibilityRow.NOTEBOOK),
        ("python -m jupyterlab.labapp", CompatibilityRow.NOTEBOOK),
        ("python -Im jupyter_server", CompatibilityRow.NOTEBOOK),
        ("python -mjupyter_server", CompatibilityRow.NOTEBOOK),
        ("python -u -X dev -Wignore --check-hash-based-pycs -m jupyter_server", CompatibilityRow.NOTEBOOK),
        ("python -X frozen_modules=off /opt/env/bin/jupyter-server", CompatibilityRow.NOTEBOOK),
        ("python /usr/bin/torchrun train.py", CompatibilityRow.TORCHRUN),
        ("python -m accelerate.commands.launch train.py", CompatibilityRow.TORCHRUN),
        ("python -m torch.distributed.run train.py", None),  # PyTorch names that process pt_elastic
        ("python -m notebooks", None),
        ("python train.py -m jupyter_server", None),
        ("python -c pass -m jupyter_server", None),
        ("python -W jupyter", None),
        ("python -m", None),
        ("python", None),
        ("less /opt/env/bin/jupyter-server", None),
        ("/home/a/python/less jupyter-server", None),
        ("", None),
    ],
)
def test_program_of_python_is_named(command: str, kind: CompatibilityRow | None) -> None:
    """It is named by its module or script, because the process name is that of the interpreter."""
    assert check_image(more=python(command)) == (() if kind is None else (kind,))


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/usr/lib/code-server/lib/node /usr/lib/code-server --port 8080", CompatibilityRow.EDITOR),
        ("/usr/lib/code-server/lib/node /usr/lib/code-server/out/node/entry", CompatibilityRow.EDITOR),
        ("node /usr/bin/code-server", CompatibilityRow.EDITOR),
        ("/home/a/.vscode-server/node /home/a/.vscode-server/out/server-main.js", CompatibilityRow.EDITOR),
        ("node server.js code-server", None),
        ("less code-server.log", None),
    ],
)
def test_server_of_an_editor_is_named(command: str, kind: CompatibilityRow | None) -> None:
    """By its command line: the name of its process is that of Node.js."""
    process = replace(SCRIPT, pid=102, name="MainThread", arguments=tuple(command.split()))
    assert check_image(more=process) == (() if kind is None else (kind,))


def test_several_kinds_are_in_the_order_of_the_table() -> None:
    assert check_image(slurm={"array_job_id": 5}, users=(101, 102), codes=("mps", "host-memory")) == (
        CompatibilityRow.ARRAY,
        CompatibilityRow.SEVERAL_GPUS,
        CompatibilityRow.MPS,
    )
