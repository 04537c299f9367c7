"""Stop agents at the beginning of a phase: after its journal entry is written, before it has any effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.driver import GPU_NODES, Cluster, wait_until
from cluster.sleepers import LOCAL, kill_agent

_STOPPER = "/run/phase-stopper.py"
_ARMED = "/run/phase-armed"
_STOPPED = "/run/phase-stopped"

# Woken by the kernel when a journal is written; stops the agent when a line announces the phase, then exits.
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
    os.kill(agent, signal.SIGCONT)  # too late: the phase may have had effects
stopped.touch()
"""


@contextmanager
def stopping_at(cluster: Cluster, phase: str, *nodes: str) -> Iterator[None]:
    """Stop the agents of these nodes (default: all GPU nodes) when ``phase`` begins while the context lasts.

    Agents that are still stopped continue when it ends.
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
            continue_agent(cluster, node)


def wait_for_stop(cluster: Cluster, completed: Callable[[], bool], *, timeout_s: float = 60) -> str | None:
    """Wait until an agent is stopped; return its node, or ``None`` if the phase passed too quickly on a busy machine.

    ``completed`` returns whether the suspension or restore has completed.
    """

    def stopped_node() -> str:
        missed = completed()  # before the next check: a stopped agent does not complete anything
        stopped = (node for node in GPU_NODES if cluster.run(node, "test", "-e", _STOPPED).returncode == 0)
        return next(stopped, "missed" if missed else "")

    result = wait_until("an agent is stopped", stopped_node, timeout_s=timeout_s)
    return None if result == "missed" else result


def open_journals(cluster: Cluster) -> str:
    """Return the names of the journals of incomplete suspensions."""
    return "".join(cluster.run(node, "ls", f"{LOCAL}/journal").stdout for node in GPU_NODES)


def continue_agent(cluster: Cluster, node: str) -> None:
    """Continue the stopped agent."""
    cluster.shell(node, f"rm -f {_STOPPED}; kill -CONT $(cat /run/slurm-affinode-agent.pid) || true")


def kill_stopped(cluster: Cluster, node: str) -> None:
    """Kill the stopped agent, and wait until its successor is running."""
    cluster.shell(node, f"rm -f {_STOPPED}")
    kill_agent(cluster, node)


def wait_settled(cluster: Cluster, timeout_s: float = 90) -> None:
    """Wait until no journal is open: every job runs, is suspended with a shared image, or has ended."""
    wait_until("no journal is open", lambda: open_journals(cluster), lambda names: names == "", timeout_s=timeout_s)
