"""Agents that stand still exactly where a phase begins: its line is in the journal, its effects are not there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.driver import GPU_NODES, Cluster, wait_until
from cluster.sleepers import LOCAL, kill_agent

_STOPPER = "/run/phase-stopper.py"
_ARMED = "/run/phase-armed"
_STOPPED = "/run/phase-stopped"

# Woken by the kernel when a journal is written to; stops the agent when a line announces the phase, and ends.
_PROGRAM = r"""
import ctypes, json, os, pathlib, signal, sys
phase, armed, stopped = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
journal = pathlib.Path("/var/lib/slurm-affinode/journal")
journal.mkdir(mode=0o700, parents=True, exist_ok=True)
agent = int(pathlib.Path("/run/slurm-affinode-agent.pid").read_text())
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, os.fsencode(journal), 0x2) > 0  # IN_MODIFY
def begun():
    lines = [path.read_text().splitlines() for path in journal.glob("*.jsonl")]
    return any(found and json.loads(found[-1])["phase"] == phase for found in lines)
armed.touch()
while True:
    os.read(watch, 65536)
    if not begun():
        continue
    os.kill(agent, signal.SIGSTOP)
    if begun():
        break
    os.kill(agent, signal.SIGCONT)  # too late: its effects may be there
stopped.touch()
"""


@contextmanager
def stopping_at(cluster: Cluster, phase: str, *nodes: str) -> Iterator[None]:
    """While the context lasts the agents of these nodes (all: none is named) stand still once ``phase`` begins.

    At its end those that still stand go on.
    """
    nodes = nodes or GPU_NODES
    for node in nodes:
        cluster.exec(node, "tee", _STOPPER, stdin=_PROGRAM)
        cluster.shell(
            node,
            'rm -f "$3" "$4"; setsid -f python3 "$1" "$2" "$3" "$4" >/run/phase-stopper.log 2>&1 </dev/null',
            _STOPPER, phase, _ARMED, _STOPPED,
        )  # fmt: skip
        wait_until(
            f"the journal of {node} is watched",
            lambda node=node: cluster.run(node, "test", "-e", _ARMED).returncode == 0,  # type: ignore[misc]
        )
    try:
        yield
    finally:
        for node in nodes:
            cluster.shell(node, f"pkill -KILL -f '^python3 {_STOPPER}' || true; rm -f {_ARMED}")
            go_on(cluster, node)


def wait_for_stop(cluster: Cluster, through: Callable[[], bool], *, timeout_s: float = 60) -> str | None:
    """Waits until an agent stands still; whose it is. ``None``: none did, it was too quick for that on a busy machine.

    ``through``: whether the suspension or restore has got through.
    """

    def look() -> str:
        missed = through()  # before the other look: an agent that stands still does not get through
        stopped = (node for node in GPU_NODES if cluster.run(node, "test", "-e", _STOPPED).returncode == 0)
        return next(stopped, "missed" if missed else "")

    found = wait_until("an agent stands still", look, timeout_s=timeout_s)
    return None if found == "missed" else found


def open_journals(cluster: Cluster) -> str:
    """The names of suspensions that are not through."""
    return "".join(cluster.run(node, "ls", f"{LOCAL}/journal").stdout for node in GPU_NODES)


def go_on(cluster: Cluster, node: str) -> None:
    """The agent goes on where it stands."""
    cluster.shell(node, f"rm -f {_STOPPED}; kill -CONT $(cat /run/slurm-affinode-agent.pid) || true")


def kill_stopped(cluster: Cluster, node: str) -> None:
    """It never does; another one is started."""
    cluster.shell(node, f"rm -f {_STOPPED}")
    kill_agent(cluster, node)


def wait_settled(cluster: Cluster, timeout_s: float = 90) -> None:
    """Waits until no journal is open: every job runs, sleeps with its image shared, or is over."""
    wait_until("no journal is open", lambda: open_journals(cluster), lambda names: names == "", timeout_s=timeout_s)
