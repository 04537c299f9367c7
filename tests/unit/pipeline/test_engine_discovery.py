"""Engines in jobs: found by their sockets, scraped with the user's privileges, exported with bounded labels."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent_stand_ins import Gpus
from prometheus_client import CollectorRegistry, generate_latest
from waiting import wait_until

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.pidfd import ExhaustedError, Id, Process, processes
from slurm_affinode.engines import metric_table, scrape
from slurm_affinode.engines.scrape import EngineReading
from slurm_affinode.gpu import server_trees
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.server_trees import GpuHolder, LostServer, ServerPort, ServerTrees
from slurm_affinode.model.gpu import JobRef, Sweep
from slurm_affinode.pipeline import engine_discovery
from slurm_affinode.pipeline.engine_discovery import DiscoveredEngine, EngineScraper, ListeningPort
from slurm_affinode.pipeline.exporter import LastEngines, ProcessesOnGpus
from slurm_affinode.suspension.records.journal import Journal

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(b'vllm:num_requests_running{model_name="m"} 2\\n')
        self.wfile.write(b'vllm:num_preemptions_total{model_name="m"} 5\\n')
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
if os.fork() == 0:  # a worker shares the socket
    server.serve_forever()
print(server.server_port, flush=True)
server.serve_forever()
"""


class OneJob(JobFinder):
    """A job finder that assigns the processes of a session to job 7."""

    def __init__(self, session: int, source: str = "cgroup") -> None:
        super().__init__()
        self._session, self._source = str(session), source

    def of(self, process: Process) -> JobRef | None:
        try:
            return JobRef(7, "0", self._source) if process.stat().fields[3] == self._session else None
        except OSError:  # it has ended
            return None


def named(name: str) -> str:
    """Return a command name with which Python finds its library, wherever ``PATH`` leads."""
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """A server with a worker; yield the PID of its session and its port."""
    argv = [named("vllm"), "-c", SERVER]
    with subprocess.Popen(argv, executable=sys.executable, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        yield started.pid, int(started.stdout.readline())
        os.killpg(started.pid, 9)


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to examine and become other users")


def test_engine_of_a_job_is_found_and_scraped(server: tuple[int, int]) -> None:
    """Its workers share the socket and count once."""
    session, port = server
    scraper = EngineScraper(OneJob(session), say=pytest.fail)
    (result,) = scraper.round()
    assert (result.job, result.user, result.address, result.up) == ("7", "nobody", f"127.0.0.1:{port}", True)
    assert result.reading == EngineReading("vllm", "m", None, {"running": 2.0, "preemptions": 5.0})
    assert 0 < result.took_s < engine_discovery.PROGRAM_S


def test_job_named_by_the_environment_does_not_count(server: tuple[int, int]) -> None:
    """A user could export metrics as another user's job."""
    assert engine_discovery.ports(OneJob(server[0], "environment")) == []


def test_processes_without_a_job_are_not_scraped(server: tuple[int, int]) -> None:
    assert engine_discovery.ports(OneJob(2**30)) == []


def test_ports_of_a_job_are_limited(server: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_discovery, "MOST_PORTS_OF_JOB", 0)
    assert engine_discovery.ports(OneJob(server[0])) == []


def test_search_of_a_job_is_limited(server: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with thousands of processes, each with thousands of descriptors, does not delay the search of others."""
    session, _ = server
    looked: list[int] = []

    def sockets_of(process: Process) -> list[int]:
        looked.append(process.pid)
        return []

    monkeypatch.setattr(engine_discovery, "sockets_of", sockets_of)
    assert engine_discovery.ports(OneJob(session)) == []
    assert len(looked) == 2  # the server and its worker
    monkeypatch.setattr(engine_discovery, "MOST_SEARCH_S", 0.0)
    assert engine_discovery.ports(OneJob(session)) == []
    assert len(looked) == 3


def test_result_is_discarded_if_the_process_does_not_hold_the_socket(server: tuple[int, int]) -> None:
    """Another program may have bound the port in the meantime."""
    (port,) = engine_discovery.ports(OneJob(server[0]))
    other = replace(port, inode=port.inode + 10**9)
    gone = replace(port, process=Id(port.process.pid, port.process.started + 1))
    for item in (other, gone):
        assert EngineScraper(OneJob(0), say=pytest.fail, list_ports=lambda entry=item: [entry]).round() == []


def test_stopped_server_is_scraped_once_it_runs_again(server: tuple[int, int]) -> None:
    """A request would wake a job that sleeps in place."""
    session, _ = server
    requested: list[ListeningPort] = []

    def send(port: ListeningPort) -> list[EngineReading]:
        requested.append(port)
        return engine_discovery.request(port)

    scraper = EngineScraper(OneJob(session), say=pytest.fail, send=send)
    os.killpg(session, signal.SIGSTOP)
    with Process(session) as process:
        wait_until("the server is stopped", lambda: process.stat().state == "T")
    assert (scraper.round(), requested) == ([], [])
    os.killpg(session, signal.SIGCONT)
    assert len(scraper.round()) == len(requested) == 1


def test_ports_of_ended_processes_are_not_requested(server: tuple[int, int]) -> None:
    """Another process now has the PID, and may sleep in place."""
    (port,) = engine_discovery.ports(OneJob(server[0]))
    gone = replace(port, process=Id(port.process.pid, port.process.started + 1))
    requested: list[ListeningPort] = []
    EngineScraper(
        OneJob(0), say=pytest.fail, list_ports=lambda: [gone], send=lambda item: requested.append(item) or []
    ).round()
    assert requested == []


def test_server_that_is_stopped_during_a_round_is_not_requested(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other servers that do not respond can delay its request."""
    session, _ = server
    (port,) = engine_discovery.ports(OneJob(session))
    others = [port, replace(port, inode=port.inode + 10**9)]
    requested: list[ListeningPort] = []

    def send(port: ListeningPort) -> list[EngineReading]:
        requested.append(port)
        os.killpg(session, signal.SIGSTOP)
        with Process(session) as process:
            wait_until("the server is stopped", lambda: process.stat().state == "T")
        return []

    monkeypatch.setattr(engine_discovery, "AT_ONCE", 1)
    EngineScraper(OneJob(0), say=pytest.fail, list_ports=lambda: others, send=send).round()
    assert requested == [port]


def test_lack_of_descriptors_is_reported_once(server: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search continues in the next round."""
    (port,) = engine_discovery.ports(OneJob(server[0]))
    messages: list[str] = []

    def exhausted(process: Process) -> Iterator[int]:
        raise ExhaustedError(f"process {process.pid} cannot be examined: Too many open files")

    scraper = EngineScraper(OneJob(0), say=messages.append, list_ports=lambda: [port])
    with monkeypatch.context() as patch:
        patch.setattr(engine_discovery, "sockets_of", exhausted)
        assert scraper.round() == scraper.round() == []
    text = f"engines are not searched for: process {port.process.pid} cannot be examined: Too many open files"
    assert messages == [text]
    assert len(scraper.round()) == 1


def test_ended_server_is_not_exported(server: tuple[int, int]) -> None:
    session, _ = server
    scraper = EngineScraper(OneJob(session), say=pytest.fail)
    assert scraper.round()
    os.killpg(session, 9)
    wait_until("the server has ended", lambda: not engine_discovery.ports(OneJob(session)))
    assert scraper.round() == []


class Script:
    """A port whose responses a test sets, with a clock."""

    def __init__(self, port: ListeningPort) -> None:
        self.port, self.time, self.requests = port, 0.0, 0
        self.answer: list[EngineReading] | None = []
        """``None``: no response of HTTP."""
        self.scraper = EngineScraper(
            OneJob(0), say=pytest.fail, list_ports=lambda: [self.port], send=self._send, now=lambda: self.time
        )

    def _send(self, _: ListeningPort) -> list[EngineReading]:
        self.requests += 1
        if self.answer is None:
            raise UnreachableError("refused")
        return self.answer


@pytest.fixture
def script(server: tuple[int, int]) -> Script:
    (port,) = engine_discovery.ports(OneJob(server[0]))
    return Script(port)


def test_port_without_an_engine_is_requested_less_and_less_often(script: Script) -> None:
    """At first soon, since a server that loads its model does not respond like an engine yet."""
    requested_s = []
    for script.time in range(3600):
        before = script.requests
        assert script.scraper.round() == []
        requested_s += [script.time] * (script.requests - before)
    pauses = [later - item for item, later in itertools.pairwise(requested_s)]
    assert pauses[0] <= 15
    assert pauses == sorted(pauses)
    assert len(requested_s) <= 13


def test_process_that_refuses_is_probed_a_few_times_in_its_life(script: Script) -> None:
    """Each probe may cost it a descriptor. Further sockets of the same process count as well."""
    script.answer = None
    at_s = []
    for script.time in range(0, 3 * 86400, 60):
        before = script.requests
        script.port = replace(script.port, rank=script.time % 3)
        assert script.scraper.round() == []
        at_s += [script.time] * (script.requests - before)
    assert len(at_s) == engine_discovery.MOST_REFUSALS
    assert at_s[-1] - at_s[-2] > 3600


def test_server_is_found_soon_after_it_has_loaded_its_model(script: Script) -> None:
    """No later than twice the time that this took."""
    for script.time in range(0, 60, 2):
        script.scraper.round()
    script.answer = [EngineReading("llamacpp", "m", None, {"running": 0.0})]
    result = []
    while not result and script.time < 3600:
        script.time += 2
        result = script.scraper.round()
    assert script.time <= 130


def test_engine_that_does_not_respond_is_down_and_then_forgotten(script: Script) -> None:
    """Its values are unknown meanwhile, and never those of an earlier scrape."""
    script.answer = [EngineReading("vllm", "m", None, {"running": 1.0})]
    assert [item.up for item in script.scraper.round()] == [True]
    script.answer = None
    for script.time in (60, 60.5):  # the second one without a request
        (down,) = script.scraper.round()
        assert (down.up, down.reading.model, down.reading.values) == (False, "m", {})
    assert script.requests == 2
    script.time += engine_discovery.RETRY_S
    assert script.scraper.round() == []


def test_engine_that_hung_is_found_again(script: Script) -> None:
    """It has responded before, so that it is not given up."""
    script.answer = [EngineReading("vllm", "m", None, {"running": 1.0})]
    assert script.scraper.round()
    script.answer = None
    for script.time in range(15, 3600, 15):
        script.scraper.round()
    assert script.requests <= 13
    script.answer = [EngineReading("vllm", "m", None, {"running": 1.0})]
    for script.time in range(3600, 7300, 15):
        if script.scraper.round():
            return
    pytest.fail("it is not found")


PEERS = """
import os, selectors, socket, sys
kind, count = sys.argv[1], int(sys.argv[2])
listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
waiting, kept = selectors.DefaultSelector(), []
for one in listeners:
    if kind != "never-accepts":
        waiting.register(one, selectors.EVENT_READ)
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
print(*(one.getsockname()[1] for one in listeners), flush=True)
while True:
    for key, _ in waiting.select():
        kept.append(key.fileobj.accept()[0])
"""


def in_process(port: ListeningPort) -> list[EngineReading]:
    """Scrape without a program of its own, with a short timeout."""
    try:
        return scrape.readings(scrape.fetch(port.host, port.port, timeout_s=0.2))
    except scrape.NoMetricsError:
        return []
    except (OSError, ValueError) as error:
        raise UnreachableError(str(error)) from error


def probe_for_a_day(session: int) -> list[ListeningPort]:
    """Run the rounds of a day with real connections; return the ports that were connected to.

    Only this process is examined: examining all others, round after round, takes a minute.
    """
    requested: list[ListeningPort] = []
    clock = [0.0]

    def send(port: ListeningPort) -> list[EngineReading]:
        requested.append(port)
        return in_process(port)

    scraper = EngineScraper(OneJob(session), say=pytest.fail, send=send, now=lambda: clock[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_discovery, "processes", lambda proc: processes([session], proc=proc))
        for clock[0] in (*range(0, 900, 15), *range(900, 86400, 900)):
            scraper.round()
    return requested


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def half_closed(ports: set[int]) -> list[str]:
    """Return the connections to these ports that the kernel keeps in CLOSE-WAIT."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "08" and int(row[1].partition(":")[2], 16) in ports]


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[tuple[int, set[int]]]:
    """A program with listeners that is no HTTP server; yield its PID and ports."""
    name, kind, count = request.param
    with subprocess.Popen(
        [named(name), "-c", PEERS, kind, str(count)],
        executable=sys.executable,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        yield started.pid, set(map(int, started.stdout.readline().split()))
        started.kill()


@pytest.mark.parametrize(
    "peer", [("python3", "never-accepts", 8), ("python3", "never-closes", 8)], indirect=True, ids=lambda item: item[1]
)
def test_plain_program_is_not_connected_to_within_a_day(peer: tuple[int, set[int]]) -> None:
    """It asked for nothing, and would have to close what it accepts."""
    pid, own_ports = peer
    before = descriptors(pid)
    assert probe_for_a_day(pid) == []
    assert (descriptors(pid), half_closed(own_ports)) == (before, [])


@pytest.mark.parametrize(
    "peer", [("vllm", "never-accepts", 13), ("vllm", "never-closes", 13)], indirect=True, ids=lambda item: item[1]
)
def test_engine_without_http_loses_few_descriptors_in_a_day(peer: tuple[int, set[int]]) -> None:
    """Its sockets are reset: the kernel keeps none half closed, with bytes that would hinder a suspension."""
    pid, own_ports = peer
    before = descriptors(pid)
    assert 0 < len(probe_for_a_day(pid)) <= engine_discovery.MOST_REFUSALS
    assert descriptors(pid) <= before + engine_discovery.MOST_REFUSALS
    assert half_closed(own_ports) == []


def test_descriptors_of_an_engine_are_unchanged_after_a_day(server: tuple[int, int]) -> None:
    session, port = server
    before = descriptors(session)
    assert len(probe_for_a_day(session)) > 100
    wait_until("the server has closed its connections", lambda: descriptors(session) == before)
    assert half_closed({port}) == []


@pytest.mark.parametrize("peer", [("vllm", "never-accepts", 40)], indirect=True)
def test_ports_beyond_the_bound_are_reported(peer: tuple[int, set[int]]) -> None:
    pid, _ = peer
    messages: list[str] = []
    ports = engine_discovery.ports(OneJob(pid), say=messages.append)
    assert len(ports) == engine_discovery.MOST_PORTS_OF_JOB
    assert messages == ["job 7: 40 ports of model servers, of which 16 are examined"]


@pytest.mark.parametrize("peer", [("vllm", "never-closes", 40)], indirect=True)
def test_announced_port_is_first_among_many(peer: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has many sockets beside that of its API."""
    pid, own_ports = peer
    announced = max(own_ports)
    table = metric_table.load()
    known = {**table.engines, "vllm": replace(table.engines["vllm"], ports=(announced,))}
    monkeypatch.setattr(metric_table, "load", lambda: replace(table, engines=known))
    assert engine_discovery.ports(OneJob(pid))[0].port == announced


def test_port_that_the_job_names_is_announced() -> None:
    """For servers that a script of the user's starts from a library."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = (
        "import http.server, os, sys\n"
        f"server = http.server.HTTPServer(('127.0.0.1', {port}), http.server.BaseHTTPRequestHandler)\n"
        "other = http.server.HTTPServer(('127.0.0.1', 0), http.server.BaseHTTPRequestHandler)\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "print('listens', flush=True); server.serve_forever()\n"
    )
    environ = {**os.environ, engine_discovery.VARIABLE: f"1,{port}"}
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ, start_new_session=True) as started:
        assert started.stdout is not None
        started.stdout.readline()
        ports = engine_discovery.ports(OneJob(started.pid))
        started.kill()
    assert [item.port for item in ports] == [port]


@pytest.mark.parametrize(
    ("peer", "pattern"),
    [
        (("serve_llm.bin", "never-accepts", 1), "serve_*"),
        (("serve_llm.py", "never-accepts", 1), "serve_llm"),
        (("serve_llm.py", "never-accepts", 1), "serve_llm.py"),
    ],
    indirect=["peer"],
)
def test_programs_of_the_site_are_examined(peer: tuple[int, set[int]], pattern: str) -> None:
    pid, own_ports = peer
    assert engine_discovery.ports(OneJob(pid)) == []
    (port,) = engine_discovery.ports(OneJob(pid), programs=[pattern])
    assert port.port in own_ports


def test_job_that_is_being_suspended_is_not_requested(server: tuple[int, int]) -> None:
    """The connection would roll its suspension back. The agent announces the suspension in its journal."""
    session, _ = server
    suspending = {7}
    scraper = EngineScraper(OneJob(session), say=pytest.fail, send=in_process, suspending=lambda: suspending)
    assert scraper.round() == []
    suspending.clear()
    assert len(scraper.round()) == 1


def test_nothing_is_requested_while_it_is_unknown_which_jobs_are_being_suspended(
    server: tuple[int, int], tmp_path: Path
) -> None:
    session, _ = server
    directory, messages = tmp_path / "journal", list[str]()
    scraper = EngineScraper(
        OneJob(session), say=messages.append, send=in_process, suspending=Journal(directory).open_jobs
    )  # fmt: skip
    directory.write_text("")
    assert scraper.round() == []
    assert messages == [f"engines are not searched for: {directory}: cannot be read: Not a directory"]
    directory.unlink()
    directory.mkdir()
    (directory / "alpha.7.1790000000.jsonl").write_text("")
    assert scraper.round() == []
    (directory / "alpha.7.1790000000.jsonl").rename(directory / "alpha.8.1790000000.jsonl")
    assert len(scraper.round()) == 1


@pytest.mark.parametrize(
    ("tcp", "tcp6", "expected"),
    [
        ("0100007F:1F40 00000000:0000 0A 0:0 0:0 0 65534 0 42 1", "", {42: ("127.0.0.1", 8000)}),
        ("00000000:1F40 00000000:0000 0A 0:0 0:0 0 65534 0 42 1", "", {42: ("127.0.0.1", 8000)}),
        ("0100007F:1F40 00000000:0000 01 0:0 0:0 0 65534 0 42 1", "", {}),
        ("", f"{'0' * 32}:1F40 {'0' * 32}:0000 0A 0:0 0:0 0 65534 0 42 1", {42: ("::1", 8000)}),
        ("0100007F:XXXX 00000000:0000 0A 0:0 0:0 0 0 0 42 1", "1:2:3", {}),
        ("01000:1F40 00000000:0000 0A 0:0 0:0 0 0 0 42 1", "", {}),
    ],
)
def test_listening_sockets_of_the_kernel(
    tmp_path: Path, tcp: str, tcp6: str, expected: dict[int, tuple[str, int]]
) -> None:  # fmt: skip
    net = tmp_path / "self" / "net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(f"  sl\n   0: {tcp}\n" if tcp else "  sl\n")
    if tcp6:
        (net / "tcp6").write_text(f"  sl\n   0: {tcp6}\n")
    assert server_trees.listening(proc=tmp_path) == expected


def test_unreadable_list_of_sockets_is_an_error(tmp_path: Path) -> None:
    """An empty list would mean that no server listens."""
    with pytest.raises(FileNotFoundError):
        server_trees.listening(proc=tmp_path)
    assert engine_discovery.ports(JobFinder(), proc=tmp_path) == []


def exported(*engines: DiscoveredEngine) -> list[str]:
    last = LastEngines(
        node="gpu01", cluster="alpha", stale_s=60, gpus=lambda: {"7": ("GPU-1", "GPU-2")}, now=lambda: 0.0
    )
    last.put(list(engines))
    registry = CollectorRegistry()
    registry.register(last)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


ENGINE = DiscoveredEngine(
    EngineReading("vllm", "m", "0", {"running": 2.0, "preemptions": 5.0}), "127.0.0.1:8000", "7", "ada", 0.5
)
LABELS = (
    'Hostname="gpu01",address="127.0.0.1:8000",cluster="alpha",engine="vllm",gpus="GPU-1,GPU-2",hpc_job="7",model="m",'
    'rank="0",user="ada"'
)


def test_engine_is_exported_with_job_user_and_gpus() -> None:
    assert sorted(exported(ENGINE)) == [
        f"slurm_affinode_serving_preemptions_total{{{LABELS}}} 5.0",
        f"slurm_affinode_serving_running{{{LABELS}}} 2.0",
        f"slurm_affinode_serving_scrape_s{{{LABELS}}} 0.5",
        f"slurm_affinode_serving_up{{{LABELS}}} 1.0",
    ]


def test_lengths_of_requests_are_exported_as_buckets() -> None:
    buckets = {"prompt_lengths": ((100.0, 3.0), (math.inf, 4.0))}
    result = replace(ENGINE, reading=EngineReading("vllm", "m", "0", {}, buckets))
    labels = LABELS.replace('hpc_job="7",', 'hpc_job="7",le="{}",')
    assert sorted(exported(result))[:2] == [
        f"slurm_affinode_serving_prompt_lengths_bucket{{{labels.format('+Inf')}}} 4.0",
        f"slurm_affinode_serving_prompt_lengths_bucket{{{labels.format('100.0')}}} 3.0",
    ]


class Left(ServerTrees):
    """Reports that the server of every process has ended."""

    port = ServerPort(1, 7, 8000, "127.0.0.1:8000", "ada", (("vllm", "m", "0"),))

    def lost(self, process: Process, job: int) -> LostServer | None:
        return LostServer(self.port, (41,), 1000.0)


@pytest.mark.parametrize(("used", "memory"), [((512.0, 256.0), ["768.0"]), ((512.0, None), [])])
def test_orphaned_engine_is_exported_without_up(used: tuple[float | None, ...], memory: list[str]) -> None:
    """The memory of some of its processes is not reported as the total."""
    on_gpu = [GpuHolder(Process(os.getpid()), 7, mib) for mib in used]
    result = engine_discovery.orphaned(Left(JobFinder()), on_gpu)
    assert sorted(exported(*result)) == [
        *(f"slurm_affinode_serving_orphaned_memory_mib{{{LABELS}}} {item}" for item in memory),
        f"slurm_affinode_serving_orphaned_processes{{{LABELS}}} 2.0",
    ]


def test_ports_that_responded_as_engines_are_scraped_once_if_requested(server: tuple[int, int]) -> None:
    (port,) = engine_discovery.ports(OneJob(server[0]))
    sent = []

    def send(port: ListeningPort) -> list[EngineReading]:
        sent.append(port)
        return [EngineReading("vllm", "m", None, {"running": 1.0})]

    scraper = EngineScraper(OneJob(0), say=pytest.fail, list_ports=lambda: [port], send=send, once=True)
    for _ in range(3):
        scraper.round()
    (known,) = scraper.servers()
    assert sent == [port]
    assert (known.inode, known.port, known.engines) == (port.inode, port.port, (("vllm", "m", None),))


def test_processes_on_gpus_are_read_at_intervals_and_unknown_without_a_driver(server: tuple[int, int]) -> None:
    session, _ = server
    driver, clock = Gpus(holders={0: [session]}), [0.0]
    sink = ProcessesOnGpus(driver, OneJob(session), period_s=10, now=lambda: clock[0])
    sink.put(Sweep(0.0))
    assert [(item.process.pid, item.job) for item in sink.last or ()] == [(session, 7)]
    driver.missing = True
    sink.put(Sweep(5.0))
    assert sink.last
    clock[0] = 10
    sink.put(Sweep(10.0))
    assert sink.last is None


def test_two_engines_with_the_same_labels_are_one_series() -> None:
    """Prometheus would reject the whole scrape otherwise."""
    lines = exported(ENGINE, ENGINE)
    assert len(lines) == len({line.split(" ")[0] for line in lines}) == 4


def test_quotes_in_a_model_name_are_escaped() -> None:
    hostile = replace(ENGINE, reading=replace(ENGINE.reading, model='m"} 1\\'))
    assert all('model="m\\"} 1\\\\"' in line for line in exported(hostile))
