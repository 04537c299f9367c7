"""Helpers for tests of the SPANK plugin: pairs of jobs with and without the option, and a fake agent."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.driver import Cluster, wait_until

OPTION = "--gpu-suspend-idle=15m"
SETTLED_S = 15.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job: its record and that of its batch step."""

    state: str
    exit_code: str
    batch_state: str
    batch_exit_code: str


@dataclass(frozen=True, slots=True)
class Pair:
    """The same job submitted twice, without and with the option."""

    without: str
    with_option: str

    @property
    def both(self) -> tuple[str, str]:
        """The job IDs: without the option, with the option."""
        return (self.without, self.with_option)


def submit_pair(cluster: Cluster, script: str, *options: str) -> Pair:
    """Submit a script twice, once with the option; Slurm chooses the nodes."""
    without = cluster.submit(*options, script=script)
    return Pair(without, cluster.submit(*options, OPTION, script=script))


def outcome(cluster: Cluster, job: str) -> Outcome:
    """Wait until accounting has the end of a job and of its batch step; return both.

    Its processes have ended by then: the state of a job whose time is up changes before they get a signal.
    """
    wait_until(
        f"job {job} no longer has processes",
        lambda: cluster.run("login", "squeue", "--noheader", f"--jobs={job}").stdout,
        lambda row: not row.strip(),
        timeout_s=150,  # the shortest time limit is a minute, and slurmctld checks it every 30 s
    )
    argv = ("sacct", "--noheader", "--parsable2", "--format=JobID,State,ExitCode", f"--jobs={job}")

    def read_rows() -> dict[str, tuple[str, str]]:
        rows = (line.split("|") for line in cluster.exec("login", *argv).splitlines())
        return {step: (state.split()[0], code) for step, state, code in rows}

    def complete(rows: dict[str, tuple[str, str]]) -> bool:
        return all(rows.get(step, ("",))[0] in ENDED for step in (job, f"{job}.batch"))

    rows = wait_until(f"accounting has the end of job {job}", read_rows, complete, timeout_s=90)
    return Outcome(*rows[job], *rows[f"{job}.batch"])


def outcomes(cluster: Cluster, pair: Pair) -> tuple[Outcome, Outcome]:
    """Return the outcomes of both jobs.

    slurmctld writes the end of a canceled step twice, so differences are checked again.
    """
    deadline = time.monotonic() + SETTLED_S
    while True:
        without, with_option = outcome(cluster, pair.without), outcome(cluster, pair.with_option)
        if without == with_option or time.monotonic() > deadline:
            return without, with_option
        time.sleep(0.5)


def outputs(cluster: Cluster, pair: Pair) -> tuple[str, str]:
    """Return the output of both jobs, with job IDs, nodes and times in Slurm's own lines replaced."""
    return normal(cluster.output(pair.without)), normal(cluster.output(pair.with_option))


def normal(text: str) -> str:
    """Replace the job, node and time in Slurm's own lines, and drop its errors about signals sent too late."""
    text = re.sub(r"^\[\d{4}-\d\d-\d\dT[^]]*\] ", "", text, flags=re.MULTILINE)
    late = r"^(?:slurmstepd\S*: )?error: _handle_signal_container: failed signal.*\n"
    text = re.sub(late, "", text, flags=re.MULTILINE)
    text = re.sub(r"JOB \d+ ON \w+ CANCELLED AT \S+", "JOB N ON NODE CANCELLED AT TIME", text)
    return re.sub(r"job\d{5,}", "jobN", text)


AGENT = Path(__file__).resolve().parents[1] / "spank" / "fake_agent.py"
AGENT_PATH = "/run/fake_agent.py"
SOCKET = "/run/slurm-affinode/shepherd.sock"
CONTROL = "/run/slurm-affinode/control.sock"


@dataclass(slots=True)
class FakeAgent:
    """The program tests/spank/fake_agent.py on a node."""

    cluster: Cluster
    node: str

    def start(self, behaviour: str) -> None:
        """Start the fake agent; stop a running one first."""
        self.stop()
        self.cluster.exec(self.node, "tee", AGENT_PATH, stdin=AGENT.read_text())
        self.cluster.shell(
            self.node,
            f'setsid -f python3 {AGENT_PATH} serve "$1" >/run/fake-agent.err 2>&1 </dev/null',
            behaviour,
        )
        wait_until("the fake agent serves", self.log, bool)

    def stop_node_agent(self) -> None:
        """Stop the node's own agent and remove its sockets, so that no agent can be reached."""
        self.cluster.shell(self.node, f"kill -STOP $(cat /run/slurm-affinode-agent.pid); rm -f {SOCKET} {CONTROL}")

    def stop(self) -> None:
        """Kill the fake agent, as in a crash."""
        self.cluster.shell(
            self.node, f"pkill -KILL -f '^python3 {AGENT_PATH} serve' || true; rm -f /run/fake-agent.log"
        )

    def remove(self) -> None:
        """Kill the fake agent and delete its files; restart the node's own agent."""
        self.stop()
        self.cluster.shell(
            self.node,
            f"rm -rf {SOCKET} /shared/slurm-affinode/images/affinode.*\n"
            "kill -KILL $(cat /run/slurm-affinode-agent.pid)",
        )
        wait_until(
            f"the agent of {self.node} serves again",
            lambda: self.cluster.run(self.node, "test", "-S", SOCKET, "-a", "-S", CONTROL).returncode == 0,
        )

    def log(self) -> list[dict[str, str]]:
        """Return the entries of the fake agent's log."""
        text = self.cluster.run(self.node, "cat", "/run/fake-agent.log").stdout
        return [json.loads(line) for line in text.splitlines()]

    def received(self, verb: str) -> list[dict[str, str]]:
        """Return the messages received with this verb."""
        return [line for line in self.log() if line.get("verb") == verb]

    def suspend(self, job: str) -> None:
        """Checkpoint a job, requeue it and hold it."""
        done = self.cluster.run(self.node, "python3", AGENT_PATH, "suspend", job)
        assert done.returncode == 0, done.stderr + str(self.log()[-3:])
