"""Model servers that share a GPU by sleeping in place: a request wakes its server."""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu import tree
from gpu.inplace import InPlace, sleeping_in_place
from gpu.machine import Machine, settled, torch_env, torch_python
from gpu.programs import HERE, Program, Programs, looked_after
from gpu.skips import without
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.gpu.interface import NotPermitted, NotSupported
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.suspension.inplace.sock_diag import SockDiag, SockDiagError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]

SERVERS, BURSTS = 4, 12
SHARE = 0.6
LARGEST_MIB = 8 * 1024
"""Per server: each burst may move this much memory out and in."""
ANSWER_S = 240.0


@dataclass
class Served:
    """A server under load."""

    job_id: int
    port: int
    prediction: str = ""


@contextmanager
def server(run: Programs, work: Path, mib: int, kind: str) -> Iterator[tuple[tree.Space, Program, int]]:
    """Start a server in its own namespace, as a job has; yield it with its port."""
    directory = work / f"server-{time.monotonic_ns()}"
    directory.mkdir()
    program = Program(directory, mute=True)
    python, env = (torch_python(), torch_env()) if kind == "torch" else (sys.executable, dict(os.environ))
    command = (python, str(HERE / "server.py"), str(directory), str(mib), kind)
    with tree.space(work, *command, env=env) as space, looked_after(run.cuda, program, always=True):
        report = program.ready()
        _, program.pid = space.root()
        yield space, program, report["port"]


def ask(port: int) -> tuple[dict[str, Any], float]:
    """Return the answer, and the time that it took in seconds."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("POST", "/predict", body=b"")
        answer = connection.getresponse()
        assert answer.status == 200
        return json.loads(answer.read()), time.monotonic() - began
    finally:
        connection.close()


def asleep(agent: InPlace, job_id: int) -> None:
    """Suspend the job in place, waiting until it is idle."""
    deadline = time.monotonic() + 60.0
    job = agent.registry.get(job_id)
    assert job is not None
    while not agent.asleep(job_id):
        why = agent.suspend(job, "the test says so")
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_four_servers_take_turns_with_one_gpu(  # noqa: PLR0917 - fixtures
    machine: Machine, run: Programs, cuda: Cuda, nvml: NvmlDriver, tmp_path: Path, note: Any, kind: str
) -> None:
    """Each uses 60 % of the memory; bursts of requests are answered once, correctly, in bounded time and moves."""
    if (why := tree.namespaces() or tree.loopback() or sockets_untold()) is not None:
        pytest.skip(why)
    if kind == "torch":
        if machine.emulated:
            pytest.skip("PyTorch computes, and the emulated driver does not")
        if machine.no_torch is not None:
            without(machine.no_torch)
    mib = min(machine.mib, LARGEST_MIB, int(machine.host_available_mib * 0.6 / SERVERS))
    with ExitStack() as stack:
        agent = stack.enter_context(sleeping_in_place(cuda, nvml, tmp_path))
        served: list[Served] = []
        for number in range(SERVERS):
            space, program, port = stack.enter_context(server(run, tmp_path, mib, kind))
            if number == 0:
                held = held_mib(nvml, program.pid)
                if held is None:
                    pytest.skip("NVML does not tell here what a process holds (a container without the host's PIDs)")
                leave_room_for_one(run, nvml, held)
            inner, _ = space.root()
            agent.watched(number + 1, space.init, inner)
            served.append(Served(number + 1, port, ask(port)[0]["prediction"]))
            asleep(agent, number + 1)
            program.restored = True
        note("gib", mib / 1024)
        agent.moves.clear()
        results = load(served)
        assert not agent.trouble, agent.trouble
        for item in served:
            answers = [answer for target, answer, _ in results if target is item]
            assert {answer["prediction"] for answer in answers} <= {item.prediction}
            assert sorted(answer["number"] for answer in answers) == list(range(2, 2 + len(answers)))
        took = sorted(seconds for _, _, seconds in results)
        swap_s = max(agent.moves, default=1.0) * 2
        note("requests", len(results))
        note("moves", len(agent.moves))
        note("out_s", round(statistics.median(agent.moves), 3) if agent.moves else None)
        note("latency_s", {"median": round(statistics.median(took), 3), "worst": round(took[-1], 3)})
        assert 0 < len(agent.moves) <= BURSTS
        assert took[-1] < SERVERS * (2 * swap_s + 5.0)


def load(served: list[Served]) -> list[tuple[Served, dict[str, Any], float]]:
    """Send requests in bursts, each burst to one server."""
    chance = random.Random(7)  # noqa: S311 - a load, not a secret
    futures: list[Any] = []
    with ThreadPoolExecutor(16) as pool:
        for _ in range(BURSTS):
            choice = chance.choice(served)
            futures += [(choice, pool.submit(ask, choice.port)) for _ in range(chance.randint(1, 3))]
            time.sleep(chance.expovariate(1))
        return [(item, *future.result()) for item, future in futures]


def sockets_untold() -> str | None:
    """Return why the kernel does not report the state of sockets, which reveals requests; ``None``: it does."""
    try:
        with closing(SockDiag()) as diag:
            diag.dump()
    except SockDiagError as error:
        return f"the kernel does not tell here how sockets stand (INET_DIAG, UNIX_DIAG): {error}"
    return None


def held_mib(nvml: NvmlDriver, pid: int) -> float | None:
    """Return the GPU memory of a process according to NVML."""
    try:
        used_mibs = [process.used_mib for process in nvml.processes(nvml.devices()[0]) if process.pid == pid]
    except (NotPermitted, NotSupported):
        return None
    return used_mibs[0] if used_mibs else None


def leave_room_for_one(run: Programs, nvml: NvmlDriver, held: float) -> None:
    """Occupy GPU memory from another process so that a server takes 60 % of the rest."""
    device = nvml.devices()[0]
    free = settled(lambda: nvml.free_mib(device)) or 0.0
    other = run.start()
    context = free - (settled(lambda: nvml.free_mib(device)) or 0.0)
    more = int(free + held - context - held / SHARE)
    if more > 0:
        other.ask("hold", mib=more)
