"""The agent's search for model servers, with a real server and its engine on a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from agent_stand_ins import Gpus

from slurm_affinode.agent.daemon import ServerDiscovery
from slurm_affinode.base.pidfd import Process
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import JobRef
from slurm_affinode.model.suspension import Mode, SuspendOption
from slurm_affinode.suspension.job.registry import Registry, WatchedJob

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to examine and become other users")

SERVER = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(sys.argv[1].encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
engine = subprocess.Popen(["sleep", "600"])
print(engine.pid, flush=True)
server.serve_forever()
"""


class OfSession(JobFinder):
    """A job finder that assigns the processes of a session to job 7."""

    def __init__(self, session: int) -> None:
        super().__init__()
        self.session = str(session)

    def of(self, process: Process) -> JobRef | None:
        try:
            return JobRef(7, "0", "cgroup") if process.stat().fields[3] == self.session else None
        except OSError:
            return None


@contextlib.contextmanager
def serving(metrics: str) -> Iterator[tuple[subprocess.Popen[str], int, ServerDiscovery]]:
    """Start a server; yield it, the PID of its engine, and a search in which the engine is on GPU 0."""
    argv = ("vllm", "-c", SERVER, metrics)
    # Python searches for its library from argv[0], and may find that of another installation.
    env = {**os.environ, "PYTHONHOME": sys.base_prefix}
    with subprocess.Popen(
        argv, executable=sys.executable, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        gpus = Gpus(holders={0: [engine]})
        yield server, engine, ServerDiscovery(lambda: contextlib.nullcontext(gpus), Registry(), OfSession(server.pid))
        os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("metrics", "orphaned"), [('vllm:num_requests_running{model_name="m"} 0\n', True), ("go_threads 4\n", False)]
)
def test_engine_is_orphaned_with_the_end_of_a_server_that_responded_as_an_engine(metrics: str, orphaned: bool) -> None:
    """A program with other metrics, or none, is not a server."""
    with serving(metrics) as (server, engine, search):
        held = Process(engine)
        search.search()
        search.search()
        assert search.trees.lost(held, 7) is None
        server.kill()
        server.wait()
        search.search()
        lost = search.trees.lost(held, 7)
        assert (lost is not None) is orphaned
        if lost is not None:
            assert (lost.pids, lost.port.engines, lost.port.user) == ((server.pid,), (("vllm", "m", None),), "nobody")


def test_jobs_without_processes_on_gpus_are_not_examined() -> None:
    with serving('vllm:num_requests_running{model_name="m"} 0\n') as (server, _, _search):
        requested: list[int] = []
        finder = OfSession(server.pid)
        finder.of = lambda process: requested.append(process.pid)  # type: ignore[method-assign, assignment, func-returns-value]
        ServerDiscovery(lambda: contextlib.nullcontext(Gpus()), Registry(), finder).search()
        assert requested == []


@pytest.mark.parametrize(("mode", "expected"), [(Mode.REQUEUE, True), (Mode.INPLACE, False)])
def test_jobs_that_may_sleep_in_place_are_not_requested(mode: Mode, expected: bool) -> None:
    """The request would wake them."""
    with serving('vllm:num_requests_running{model_name="m"} 0\n') as (server, engine, _):
        registry = Registry()
        option = SuspendOption(mode=mode)
        registry.put(WatchedJob(7, 65534, 65534, 0, option, 1, 1, 0, link=Mock(), since_epoch=0.0))
        gpus = Gpus(holders={0: [engine]})
        search = ServerDiscovery(lambda: contextlib.nullcontext(gpus), registry, OfSession(server.pid))
        held = Process(engine)
        search.search()
        server.kill()
        server.wait()
        search.search()
        assert (search.trees.lost(held, 7) is not None) is expected
