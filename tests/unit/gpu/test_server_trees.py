"""GPU processes are orphaned if the agent has observed their server and its end, and can no longer serve."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from waiting import wait_until

from slurm_affinode.base.pidfd import Process
from slurm_affinode.gpu import server_trees
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.server_trees import GpuHolder, ServerPort, ServerTrees
from slurm_affinode.model.gpu import Device, GpuProcess, JobRef

ENGINE = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
SERVER = """
import socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", 0))
listener.set_inheritable(sys.argv[2] == "inherited")
argv = [sys.executable, "-c", sys.argv[1]]
child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, close_fds=sys.argv[2] != "inherited")
print(child.stdout.readline().strip(), listener.getsockname()[1], flush=True)
time.sleep(600)
"""


class OfSession(JobFinder):
    """Assigns the processes of a session to job 7."""

    def __init__(self, session: int, source: str = "cgroup") -> None:
        super().__init__()
        self.session, self.source = str(session), source

    def of(self, process: Process) -> JobRef | None:
        try:
            in_session = process.stat().fields[3] == self.session
        except OSError:
            return None
        return JobRef(7, "0", self.source) if in_session else None


@dataclass
class Site:
    """A server in job 7 and the engine that it started."""

    server: subprocess.Popen[str]
    engine: int
    port: ServerPort
    finder: OfSession
    now: float = 1000.0

    def trees(self) -> ServerTrees:
        return ServerTrees(self.finder, now=lambda: self.now)

    def holder(self, pid: int | None = None) -> GpuHolder:
        return GpuHolder(Process(pid or self.engine), 7, 512.0)

    def end_server(self, number: int = signal.SIGKILL) -> None:
        self.server.send_signal(number)
        if number == signal.SIGKILL:
            self.server.wait()


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    argv = (sys.executable, "-c", SERVER, ENGINE, getattr(request, "param", "closed"))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        engine, port = map(int, server.stdout.readline().split())
        inode = next(inode for inode, (_, number) in server_trees.listening().items() if number == port)
        name = (("vllm", "m", None),)
        yield Site(
            server, engine, ServerPort(inode, 7, port, f"127.0.0.1:{port}", "alice", name), OfSession(server.pid)
        )
        os.killpg(server.pid, signal.SIGKILL)


def test_engine_without_its_server_is_orphaned(site: Site) -> None:
    trees, holder = site.trees(), site.holder()
    trees.update([site.port], [holder])
    assert trees.lost(holder.process, 7) is None
    site.end_server()
    trees.update([], [holder])
    site.now += 60
    lost = trees.lost(holder.process, 7)
    assert lost is not None
    assert (lost.port, lost.pids, lost.since) == (site.port, (site.server.pid,), 1000.0)


def test_zombie_is_not_a_server(site: Site) -> None:
    """Its parent may wait for it much later, as in the recording of vLLM."""
    trees, holder = site.trees(), site.holder()
    trees.update([site.port], [holder])
    site.server.send_signal(signal.SIGKILL)
    wait_until("the server has ended", lambda: Process(site.server.pid).stat().state == "Z")
    assert trees.lost(holder.process, 7) is not None


@pytest.mark.parametrize("number", [signal.SIGSTOP, 0])
def test_engine_of_a_stopped_or_slow_server_is_not_orphaned(site: Site, number: int) -> None:
    trees, holder = site.trees(), site.holder()
    trees.update([site.port], [holder])
    site.server.send_signal(number)
    trees.update([], [holder])  # it does not respond
    assert trees.lost(holder.process, 7) is None


def test_server_that_was_never_observed_is_unknown(site: Site) -> None:
    """This is the case after a restart of the agent."""
    holder = site.holder()
    site.end_server()
    trees = site.trees()
    trees.update([site.port], [holder])
    assert trees.lost(holder.process, 7) is None


def test_program_that_never_responded_as_an_engine_is_not_a_server(site: Site) -> None:
    """For example, a Jupyter server may end before a training program that it has started."""
    trees, holder = site.trees(), site.holder()
    trees.update([replace(site.port, inode=1)], [holder])
    site.end_server()
    assert trees.lost(holder.process, 7) is None


def test_server_itself_is_not_orphaned(site: Site) -> None:
    """A server of a single process (llama.cpp) may still respond to requests after it has closed its socket."""
    trees, holder = site.trees(), site.holder(site.server.pid)
    trees.update([site.port], [holder])
    trees.update([], [holder])
    assert trees.lost(holder.process, 7) is None


@pytest.mark.parametrize("site", ["inherited"], indirect=True)
def test_engine_that_holds_the_socket_may_serve(site: Site) -> None:
    """Forked workers inherit it."""
    trees, holder = site.trees(), site.holder()
    trees.update([site.port], [holder])
    site.end_server()
    assert trees.lost(holder.process, 7) is None


def test_new_server_at_the_port_protects_the_engine(site: Site) -> None:
    trees, holder = site.trees(), site.holder()
    trees.update([site.port], [holder])
    site.end_server()
    with socket.create_server(("127.0.0.1", site.port.port)):
        assert trees.lost(holder.process, 7) is None
    assert trees.lost(holder.process, 7) is not None


def test_process_is_not_orphaned_while_the_listening_sockets_are_unknown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server may listen at the port."""

    def exhausted(path: object) -> list[str]:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), str(path))

    trees, holder = site.trees(), site.holder()
    trees.update([site.port], [holder])
    site.end_server()
    with monkeypatch.context() as patched:
        patched.setattr(server_trees.kernel_text, "lines", exhausted)
        assert trees.lost(holder.process, 7) is None
    assert trees.lost(holder.process, 7) is not None


def test_process_of_another_job_is_not_orphaned(site: Site) -> None:
    trees, holder = site.trees(), site.holder()
    trees.update([replace(site.port, job=8)], [holder])
    site.end_server()
    assert trees.lost(holder.process, 7) is None
    again, other = site.trees(), site.holder()
    again.update([site.port], [other])
    assert again.lost(other.process, 8) is None


def test_ended_engine_is_forgotten(site: Site) -> None:
    trees, holder = site.trees(), site.holder()
    trees.update([site.port], [holder])
    os.kill(site.engine, signal.SIGKILL)
    site.end_server()
    wait_until("the engine has ended", holder.process.ended)
    trees.update([], [])
    assert trees.lost(holder.process, 7) is None


class Driver:
    """A driver with one process on all GPUs."""

    def __init__(self, pid: int, *used: float | None) -> None:
        self.pid, self.used = pid, used

    def devices(self) -> list[Device]:
        return [Device(f"GPU-{number}", number) for number in range(len(self.used))]

    def processes(self, device: Device) -> list[GpuProcess]:
        return [GpuProcess(self.pid, self.used[device.index], "compute")]


@pytest.mark.parametrize(("used", "total"), [((100.0, 50.0), 150.0), ((100.0, None), None), ((None, 5.0), None)])
def test_memory_on_all_gpus_counts(site: Site, used: Any, total: float | None) -> None:
    driver: Any = Driver(site.engine, *used)
    (holder,) = server_trees.holders(driver, site.finder)
    assert (holder.process.pid, holder.job, holder.used_mib) == (site.engine, 7, total)
    site.finder.source = "environment"
    assert server_trees.holders(driver, site.finder) == []
