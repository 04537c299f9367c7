"""The container cluster for tests: run commands on its nodes, submit jobs, wait for conditions."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cluster.shells import Shells

SERVICES = ("mariadb", "slurmdbd", "slurmctld", "login", "prometheus", "c1", "c2", "cpu1")
GPU_NODES = ("c1", "c2")
COMPUTE_NODES = ("c1", "c2", "cpu1")
WORKLOADS = "/usr/local/share/workloads"
SCRIPT = Path(__file__).resolve().parents[2] / "containers" / "cluster"
COMMAND_S = 60.0
WAIT_S = 120.0
POLL_S = 0.2
POLL_SHARE = 0.2
"""Largest share of the time of a wait that polling may take, because several clusters share two cores."""
POLL_MOST_S = 1.5

T = TypeVar("T")

# Polls inside the container, so that a wait takes one command instead of one per poll. Long waits poll half as
# often. Arguments: the job, seconds, the states waited for. Exits with status 3 if the job ends in another state.
WAIT_FOR_STATE = r"""
job=$1 began=$SECONDS deadline=$((SECONDS + $2)) wanted=" $3 "
ended=" COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL BOOT_FAIL DEADLINE OUT_OF_MEMORY "
while :; do
  state=$(scontrol --oneliner show job "$job" 2>/dev/null)
  state=${state#* JobState=} state=${state%%[!A-Z_]*}
  case "$wanted" in *" ${state:-none} "*) echo "$state"; exit 0 ;; esac
  case "$ended" in *" ${state:-none} "*) echo "$state"; exit 3 ;; esac
  [ "$SECONDS" -lt "$deadline" ] || { echo "${state:-unknown}"; exit 4; }
  sleep $((SECONDS - began < 5 ? 2 : 4))e-1
done
"""


# Prints the GPUs of a node as NVML reports them.
READ_GPUS = r"""
import json, pynvml as nvml
nvml.nvmlInit()
found = []
for index in range(nvml.nvmlDeviceGetCount()):
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    found.append({
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "used_mib": nvml.nvmlDeviceGetMemoryInfo(handle).used // 2**20,
        "utilization_pct": nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "pids": sorted(process.pid for process in processes),
    })
print(json.dumps(found))
"""


class ClusterError(AssertionError):
    """A command on the cluster failed, or a condition was not met in time."""


@dataclass(frozen=True, slots=True)
class Run:
    """One row of sacct for a job, without its steps."""

    job_id: str
    state: str
    user: str
    account: str
    partition: str
    qos: str
    tres: dict[str, str]
    restarts: int
    nodes: str
    elapsed_s: int
    exit_code: str


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU of a node as NVML reports it at one moment. ``used_mib`` includes the memory that the driver reserves."""

    uuid: str
    used_mib: int
    utilization_pct: int
    pids: list[int]


@dataclass(slots=True)
class Cluster:
    """A running cluster. ``name`` is its compose project."""

    name: str
    release: str
    _containers: dict[str, str] = field(default_factory=dict)
    _shells: Shells = field(default_factory=Shells)
    _scraped: bool = True

    def close(self) -> None:
        """End the shells that run commands on the nodes."""
        self._shells.close()

    def container(self, node: str) -> str:
        """Return the container ID of a node, even if it is stopped."""
        if node not in self._containers:
            labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={node}")
            result = docker("ps", "--all", "--quiet", "--no-trunc", *(f"--filter=label={label}" for label in labels))
            if not result.strip():
                raise ClusterError(f"{node} of {self.name} has no container")
            self._containers[node] = result.split()[0]
        return self._containers[node]

    def run(
        self, node: str, *argv: str, user: str = "root", stdin: str = "", timeout_s: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node and return it as completed, whatever its exit status."""
        home = "/root" if user == "root" else f"/home/{user}"
        return self._shells.run(self.container(node), argv, user=user, home=home, stdin=stdin, timeout_s=timeout_s)

    def exec(self, node: str, *argv: str, user: str = "root", stdin: str = "", timeout_s: float = COMMAND_S) -> str:
        """Return the output of a command on a node. A failing command fails the test and shows its output."""
        done = self.run(node, *argv, user=user, stdin=stdin, timeout_s=timeout_s)
        if done.returncode != 0:
            raise ClusterError(f"{node}$ {' '.join(argv)} -> {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def shell(self, node: str, script: str, *arguments: str, user: str = "root", timeout_s: float = COMMAND_S) -> str:
        """Return the output of a shell script on a node."""
        return self.exec(node, "bash", "-c", script, "test", *arguments, user=user, timeout_s=timeout_s)

    # --- jobs

    def submit(self, *options: str, script: str = "", wrap: str = "", user: str = "alice") -> str:
        """Submit a batch job, given as a script or as one command; return its ID. Output goes to the user's home."""
        text = script or f"#!/bin/bash\n{wrap}\n"
        return self.exec("login", "sbatch", "--parsable", *options, user=user, stdin=text).strip()

    def wait_for_state(self, job_id: str, *states: str, timeout_s: float = WAIT_S) -> str:
        """Wait until the job is in one of the states; return it. Fails at once if the job ends in another state."""
        done = self.run(
            "login", "bash", "-c", WAIT_FOR_STATE, "wait", job_id, str(int(timeout_s)), " ".join(states),
            timeout_s=timeout_s + COMMAND_S,
        )  # fmt: skip
        state = done.stdout.strip()
        if done.returncode == 0:
            return state
        why = "ended as" if done.returncode == 3 else f"is after {timeout_s:g} s"
        details = self.run("login", "scontrol", "show", "job", job_id)
        raise ClusterError(f"job {job_id} {why} {state}, waited for {states}\n{details.stdout}{details.stderr}")

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of a job as scontrol prints them."""
        line = self.exec("login", "scontrol", "--oneliner", "show", "job", job_id)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def comment(self, job_id: str) -> str:
        """Return the whole comment of a job; ``job`` has its first word."""
        return self.exec("login", "squeue", "--noheader", f"--jobs={job_id}", "--format=%k").strip()

    def runs(self, job_id: str, *, duplicates: bool = False) -> list[Run]:
        """Return the job's accounting records; with ``duplicates``, one per attempt."""
        fields = "JobID,State,User,Account,Partition,QOS,AllocTRES,Restarts,NodeList,ElapsedRaw,ExitCode"
        options = ("--allusers", "--allocations", "--noheader", "--parsable2", f"--format={fields}", f"--jobs={job_id}")
        text = self.exec("login", "sacct", *options, *(("--duplicates",) if duplicates else ()))
        return [_run_of(line) for line in text.splitlines()]

    def wait_for_runs(self, job_id: str, *states: str, duplicates: bool = False) -> list[Run]:
        """Wait until accounting has one record per given state; records arrive slightly late."""
        return wait_until(
            f"accounting shows job {job_id} as {states}",
            lambda: self.runs(job_id, duplicates=duplicates),
            lambda runs: sorted(run.state.split()[0] for run in runs) == sorted(states),
        )

    def output(self, job_id: str, user: str = "alice") -> str:
        """Return the contents of a job's default output file."""
        return self.exec("login", "cat", f"/home/{user}/slurm-{job_id}.out")

    def wait_for_output(self, job_id: str, text: str, user: str = "alice", timeout_s: float = WAIT_S) -> str:
        """Wait until a job has written ``text``; return its whole output."""
        path = f"/home/{user}/slurm-{job_id}.out"
        return wait_until(
            f"job {job_id} has written {text!r}",
            lambda: self.run("login", "cat", path).stdout,
            lambda written: text in written,
            timeout_s=timeout_s,
        )

    # --- the queue and the nodes

    def gpus(self, node: str) -> list[GpuReading]:
        """Return the GPUs of a node as NVML reports them now."""
        text = self.exec(node, "/opt/slurm-affinode/bin/python", "-c", READ_GPUS)
        return [GpuReading(**reading) for reading in json.loads(text)]

    def nodes(self) -> dict[str, str]:
        """Return the state of each compute node."""
        text = self.exec("login", "sinfo", "--Node", "--noheader", "--format=%N %T")
        return dict(line.split() for line in text.splitlines())

    def clear(self) -> None:
        """Cancel every job, kill leftover user processes, wait until every node is idle, and delete old output.

        A criu that a failed test has paused continues.
        """
        self.shell("login", 'jobs=$(squeue --noheader --format=%A | sort -u); [ -z "$jobs" ] || scancel $jobs || true')
        for node in GPU_NODES:
            self.shell(node, "rm -f /run/criu-hold-*; pkill -KILL -u alice,bob,carol || true")
        self.wait_idle()
        self.shell("login", "rm -f /home/*/slurm-*.out")

    def scrape(self, *, on: bool) -> None:
        """Let the exporters and Prometheus run, or stop them: sampling every second takes 5 % of a core per cluster.

        An exporter that has been started since, by its node for example, runs until the next call.
        """
        if on and self._scraped:
            return
        signal = "CONT" if on else "STOP"
        for node in GPU_NODES:
            self.shell(node, f"kill -{signal} $(cat /run/slurm-affinode-exporter.pid) || true")
        if on != self._scraped:
            docker("kill", f"--signal={signal}", self.container("prometheus"))
        self._scraped = on

    def wait_idle(self, timeout_s: float = WAIT_S) -> None:
        """Wait until no job is left and every node is idle; nodes that are down or drained are resumed."""

        def node_states() -> dict[str, str]:
            states = self.nodes()
            for node, state in states.items():
                if state.startswith(("down", "drain")) and not state.endswith("*"):
                    self.run("login", "scontrol", "update", f"nodename={node}", "state=resume")
            return states

        wait_until("every node is idle", node_states, lambda s: set(s.values()) == {"idle"}, timeout_s=timeout_s)

    def logs(self, since: float) -> dict[str, str]:
        """Return the log of each container since a time (seconds since the epoch)."""
        result: dict[str, str] = {}
        for node in SERVICES:
            done = subprocess.run(
                ("docker", "logs", f"--since={since:.3f}", self.container(node)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            result[node] = done.stdout
        return result

    # --- faults

    def kill(self, node: str) -> None:
        """Kill a container, as a power failure does."""
        self._shells.drop(self.container(node))
        docker("kill", self.container(node))

    def start(self, node: str) -> None:
        """Start a stopped container."""
        docker("start", self.container(node))

    def register(self, node: str) -> None:
        """Make slurmd register with slurmctld now; its next poll may be a minute away.

        Only then does slurmctld notice a missing batch job, and not before ``BatchStartTimeout``.
        """
        self.shell(node, "kill -HUP $(cat /run/slurmd.pid)")

    def restart(self, node: str) -> None:
        """Shut a container down cleanly and start it again."""
        self._shells.drop(self.container(node))
        docker("restart", "--time=5", self.container(node))


def docker(*argv: str, timeout_s: float = COMMAND_S) -> str:
    """Return the output of a docker command."""
    done = subprocess.run(("docker", *argv), capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise ClusterError(f"docker {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def wait_until(
    what: str, probe: Callable[[], T], good: Callable[[T], bool] = bool, *, timeout_s: float = WAIT_S
) -> T:  # fmt: skip
    """Poll until the value is accepted; return it. Fails after the deadline and shows the last value."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        seen = probe()
        if good(seen):
            return seen
        now = time.monotonic()
        if now > deadline:
            raise ClusterError(f"after {timeout_s:g} s still not true that {what}: {seen!r}")
        time.sleep(min(max(POLL_S, (now - began) * (1 / POLL_SHARE - 1)), POLL_MOST_S))


def _run_of(line: str) -> Run:
    (job_id, state, user, account, partition, qos, tres, restarts, nodes, elapsed, exit_code) = line.split("|")
    return Run(
        job_id=job_id,
        state=state,
        user=user,
        account=account,
        partition=partition,
        qos=qos,
        tres=dict(item.split("=", 1) for item in tres.split(",") if item),
        restarts=int(restarts or 0),
        nodes=nodes,
        elapsed_s=int(elapsed or 0),
        exit_code=exit_code,
    )


def script(arguments: Sequence[str], name: str, release: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``containers/cluster`` for one cluster, without checks of health, which no test reads.

    It has time to become ready while several others start on the same two cores.
    """
    settings = ("CLUSTER_HEALTH_INTERVAL=1h", "CLUSTER_READY_TIMEOUT=600")
    return subprocess.run(
        ("env", f"CLUSTER_NAME={name}", f"SLURM_RELEASE={release}", *settings, str(SCRIPT), *arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
