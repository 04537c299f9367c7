"""Real programs as jobs: llama.cpp, data loaders of PyTorch, torchrun, accelerate, Open MPI, Ray and code-server.

They compute on CPUs while they hold memory of emulated GPUs.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.programs import (
    MODEL_MIB,
    PROGRAMS,
    START_S,
    TOKENS,
    complete,
    editor_server,
    editor_sessions,
    llama_server,
    require_programs,
)
from cluster.sleepers import BY_HAND, finish, steps, steps_by_process, suspend, wait_asleep, wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600, func_only=True)]


@pytest.fixture(autouse=True)
def programs(cluster: Cluster) -> None:
    """Skip the test if the programs are not installed; wait until the agents respond."""
    require_programs(cluster)
    wait_for_agents(cluster)


def move(cluster: Cluster, job: str, node: str) -> None:
    """Wake a suspended job and wait until it is restored on the node."""
    cluster.exec("login", "scontrol", "update", f"JobId={job}", f"ReqNodeList={node}", user="alice")
    times = cluster.output(job).count("slurm-affinode: restored on")
    wake(cluster, job)
    wait_until(
        f"it is restored on {node}",
        lambda: re.findall(r"slurm-affinode: restored on (\w+)", cluster.output(job)),
        lambda nodes: len(nodes) > times,
    )
    assert cluster.job(job)["BatchHost"] == node


def test_llama_server_moves_to_another_node_and_back(cluster: Cluster) -> None:
    """The server is suspended whenever it is idle, and gives the same answer on the node where it is restored."""
    job = llama_server(cluster, "--gpu-suspend-idle=10s,when=always,wake=hold", "--gres=gpu:1")
    answers = [complete(cluster, "c1")]
    for node, other in (("c1", "c2"), ("c2", "c1")):
        assert any(gpu.used_mib >= MODEL_MIB and gpu.pids for gpu in cluster.gpus(node))
        wait_asleep(cluster, job)
        assert not any(gpu.pids for gpu in cluster.gpus(node))
        move(cluster, job, other)
        answers.append(complete(cluster, other))
    cluster.exec("login", "scancel", job, user="alice")
    assert all(f"suspended on {node}: idle" in cluster.output(job) for node in ("c1", "c2"))
    assert len(answers[0]) == TOKENS
    assert answers[1:] == answers[:1] * 2


LOADERS = {
    "file_descriptor": ("fork", "forkserver", "spawn"),
    # With the others, a program never ends, also without a suspension: Python 3.13 waits for its resource tracker, that
    # for the managers of shared memory, which have inherited its pipe, and these wait for the program.
    "file_system": ("fork",),
}
"""Sharing strategy -> start methods of workers."""


@pytest.mark.parametrize("sharing", LOADERS)
def test_data_loaders_of_pytorch_resume_in_the_middle_of_an_epoch(cluster: Cluster, sharing: str) -> None:
    """Persistent workers of each start method deliver the same batches in the same order, from the same processes."""
    methods = LOADERS[sharing]
    options = f"--steps 30 --every 0.4 --sharing {sharing} --methods {','.join(methods)}"
    command = f"exec {WORKLOADS}/torch_loader.py {options}"
    job = cluster.submit(BY_HAND, "--partition=gpu", "--gres=gpu:1", "--nodelist=c1", wrap=command)
    cluster.wait_for_output(job, "step number=3", timeout_s=START_S)
    suspend(cluster, job)
    wait_asleep(cluster, job)
    before = steps(cluster.output(job))
    move(cluster, job, "c2")
    output = finish(cluster, job)
    assert before[-1] < 30
    assert steps(output) == list(range(1, 61))
    assert re.findall(r"sequence method=(\w+) batches=(\w+)", output) == [(method, "identical") for method in methods]
    (counts,) = re.findall(r"workers counts=(\S+)", output)
    assert counts.split(",") == ["60"] * 2 * len(methods)
    assert f"exited codes={','.join(['0'] * 2 * len(methods))}\n" in output
    assert all(cluster.shell(node, "find /dev/shm -name 'torch_*'") == "" for node in ("c1", "c2"))


LAUNCHERS = {
    "torchrun": "torchrun --no-python --master-port=29501 --nproc-per-node=2 $ranks",
    "module": f"{PROGRAMS}/python -m torch.distributed.run --master-port=29502 --nproc-per-node=2 $ranks",
    "accelerate": f"{PROGRAMS}/accelerate launch --multi_gpu --num_machines=1 --num_processes=2 --mixed_precision=no "
    "--dynamo_backend=no --main_process_port=29503 $ranks --accelerate",
}
"""Commands that start two ranks."""


def test_ranks_of_pytorch_resume_on_another_node(cluster: Cluster) -> None:
    """The connections between the ranks are restored, and they train the same model as without a suspension."""
    end = "/home/alice/ranks.end"
    cluster.exec("login", "rm", "-f", end, user="alice")
    script = "#!/bin/bash\n#SBATCH --partition=gpu --ntasks=1 --cpus-per-task=6 --gres=gpu:2\n"
    # With AMX, which some processors have, the job would be refused (kernel-state).
    script += "export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE\n"
    script += f'ranks="{WORKLOADS}/torch_ranks.py --until {end}"\n'
    for name, command in LAUNCHERS.items():
        script += f'{{ srun --overlap --ntasks=1 {command}; echo "{name} ended with $?"; }} &\n'
    job = cluster.submit(f"{BY_HAND},steps=local", "--nodelist=c1", script=f"{script}wait\n")
    cluster.wait_for_output(job, "step number=1", timeout_s=START_S)
    wait_until(
        "all ranks train",
        lambda: steps_by_process(cluster.output(job)),
        lambda ranks: len(ranks) == 6,
        timeout_s=START_S,
    )
    suspend(cluster, job)
    wait_asleep(cluster, job)
    before = steps_by_process(cluster.output(job))
    move(cluster, job, "c2")
    wait_until(
        "all ranks continue to train",
        lambda: steps_by_process(cluster.output(job)),
        lambda ranks: all(len(steps) > len(before[pid]) + 1 for pid, steps in ranks.items()),
    )
    cluster.exec("login", "touch", end, user="alice")
    output = finish(cluster, job)
    assert output.count("parameters=identical") == 6
    assert output.count("memory=intact") == 6
    assert all(f"{name} ended with 0" in output for name in LAUNCHERS)
    assert all(steps == list(range(1, len(steps) + 1)) for steps in steps_by_process(cluster.output(job)).values())


def test_mpi_ranks_resume_on_another_node(cluster: Cluster) -> None:
    """Ranks that mpirun has started on one node continue to exchange messages through shared memory."""
    end = "/home/alice/mpi.end"
    cluster.exec("login", "rm", "-f", end, user="alice")
    command = f"mpirun -n 2 --bind-to none {WORKLOADS}/mpi_ranks.py --every 0.3 --until {end}; echo ended with $?"
    options = ("--partition=gpu", "--gres=gpu:2", "--ntasks=2", "--nodelist=c1")
    job = cluster.submit(BY_HAND, *options, wrap=command)
    cluster.wait_for_output(job, "step number=1", timeout_s=START_S)
    wait_until("both ranks compute", lambda: len(steps_by_process(cluster.output(job))) == 2, timeout_s=START_S)
    suspend(cluster, job)
    wait_asleep(cluster, job)
    before = steps_by_process(cluster.output(job))
    move(cluster, job, "c2")
    wait_until(
        "both ranks continue",
        lambda: steps_by_process(cluster.output(job)),
        lambda ranks: all(len(steps) > len(before[pid]) + 1 for pid, steps in ranks.items()),
    )
    cluster.exec("login", "touch", end, user="alice")
    output = finish(cluster, job)
    assert output.count("sums=identical") == 2
    assert output.count("memory=intact") == 2
    assert "ended with 0\n" in output
    assert all(steps == list(range(1, len(steps) + 1)) for steps in steps_by_process(output).values())


def test_ray_resumes_on_another_node(cluster: Cluster) -> None:
    """An actor and the object store of Ray keep their state, and Ray can start new processes.

    Its clock, ``CLOCK_MONOTONIC``, has stopped meanwhile, so that no time-out between its processes has passed.
    """
    end = "/home/alice/ray.end"
    cluster.exec("login", "rm", "-f", end, user="alice")
    script = f"export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0\nexec {WORKLOADS}/ray_actor.py --every 0.3 --until {end}"
    options = ("--partition=gpu", "--gres=gpu:1", "--cpus-per-task=2", "--nodelist=c1")
    job = cluster.submit(BY_HAND, *options, wrap=script)
    cluster.wait_for_output(job, "step number=3", timeout_s=START_S)
    suspend(cluster, job)
    wait_asleep(cluster, job)
    before = steps(cluster.output(job))
    move(cluster, job, "c2")
    cluster.wait_for_output(job, f"step number={before[-1] + 3}")
    cluster.exec("login", "touch", end, user="alice")
    output = finish(cluster, job)
    assert steps(output) == list(range(1, len(steps(output)) + 1))
    times = [
        (float(day), float(clock)) for day, clock in re.findall(r"^(\S+) .* step .* clock=(\S+)$", output, re.MULTILINE)
    ]
    missed = [day - earlier - (clock - former) for (earlier, former), (day, clock) in pairwise(times)]
    assert len(times) == len(steps(output))
    assert max(missed) > 5
    assert "trained state=identical\n" in output
    assert "read object=identical\n" in output


def test_editor_moves_with_its_sessions(cluster: Cluster) -> None:
    """A client resumes its session with code-server, and that of its extension host, at the address of the new node."""
    job = editor_server(cluster, BY_HAND, "--partition=gpu", "--gres=gpu:1", "--nodelist=c1")
    suspend(cluster, job)
    wait_asleep(cluster, job)
    move(cluster, job, "c2")
    assert editor_sessions(cluster, "c2", "known") == ["ok", "started"]
    output = finish(cluster, job)
    assert output.count("Launched Extension Host Process") == 1
    assert output.count("The client has reconnected") == 2
