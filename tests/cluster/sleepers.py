"""Suspend jobs, and control their agents and CRIU, in cluster tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.driver import GPU_NODES, WORKLOADS, Cluster, wait_until

CONFIG = "/etc/slurm-affinode/config.toml"
SHARED = "/shared/slurm-affinode"
LOCAL = "/var/lib/slurm-affinode"
NOT_YET = "cannot be suspended yet"
NOT_CONNECTED = "knows no job"
"""Error until the shepherd of a restored job, or of a job with a new agent, has connected."""
RESTORING = ("is being worked on: restoring", "has just started")
"""Errors until a restore is complete."""
UNTIL_FINISH = '--until "$HOME/slurm-$SLURM_JOB_ID-end.out"'
"""Option of ``idle_after.py``: idle until ``finish`` is called."""
BY_HAND = "--gpu-suspend-idle=1h,when=always,wake=hold"
"""Options of a job that is suspended and released only by command."""

# Exits with 0 if the agent of this node reports its status: ``slurm-affinode status`` takes eight times the CPU time.
ASK_AGENT = r"""
import json, socket
with socket.socket(socket.AF_UNIX) as agent, agent.makefile("rw") as lines:
    agent.settimeout(30)
    agent.connect("/run/slurm-affinode/root.sock")
    print('{"service": "slurm-affinode", "verb": "status"}', file=lines, flush=True)
    raise SystemExit(json.loads(lines.readline()).get("ok") is not True)
"""

# A wrapper that pauses CRIU before or after its work while /run/criu-hold-WHEN-VERB exists.
PAUSING_CRIU = r"""#!/bin/bash
verb=
for word in "$@"; do case "$word" in dump|restore) verb=$word ;; esac; done
gate() {
  [ -e "/run/criu-hold-$1-$verb" ] || return 0
  touch "/run/criu-held-$1-$verb"
  while [ -e "/run/criu-hold-$1-$verb" ]; do sleep 0.02; done
}
gate before
/usr/local/sbin/criu "$@"
status=$?
gate after
exit "$status"
"""


def idle_job(*options: str, busy: float = 1, idle: float | None = None, more: str = "") -> str:
    """Return a script that computes, idles in counted steps, and finally verifies its host and device memory.

    ``idle``: for how many seconds; by default until ``finish`` is called (not for array tasks).
    """
    head = "".join(f"#SBATCH {option}\n" for option in ("--partition=gpu", "--gres=gpu:1", *options))
    idles = f"--idle 1 {UNTIL_FINISH}" if idle is None else f"--idle {idle}"
    return f"#!/bin/bash\n{head}{WORKLOADS}/idle_after.py --busy {busy} {idles} --again 1 {more}\n"


def steps(output: str) -> list[int]:
    """Return the idle steps that a job has counted, in output order."""
    return [int(number) for number in re.findall(r"step number=(\d+)", output)]


def each_once(output: str) -> bool:
    """Return whether a job has counted every idle step once, in order."""
    numbers = steps(output)
    return numbers != [] and numbers == list(range(1, len(numbers) + 1))


def steps_by_process(output: str) -> dict[str, list[int]]:
    """Return the steps that each process of a job has counted, by its PID in the job."""
    result: dict[str, list[int]] = {}
    for pid, number in re.findall(r"pid=(\d+) step number=(\d+)", output):
        result.setdefault(pid, []).append(int(number))
    return result


def suspend(cluster: Cluster, job: str, user: str = "alice") -> None:
    """Suspend a job with a command on the login node; returns when its process tree is gone.

    Retries until its restore is complete, and the attempt has lasted for ``min_run`` and ``backoff``.
    """
    done = wait_until(
        f"job {job} can be suspended",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job, user=user),
        lambda done: not any(text in done.stderr for text in (NOT_YET, NOT_CONNECTED, *RESTORING)),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def wake(cluster: Cluster, job: str, user: str = "alice") -> None:
    """Wake the job with a command on the login node, as soon as its agent has completed the suspension."""
    done = wait_until(
        f"the suspension of job {job} is done",
        lambda: cluster.run("login", "slurm-affinode", "wake", job, user=user),
        lambda done: "is not suspended yet" not in done.stderr,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def wait_asleep(cluster: Cluster, job: str, timeout_s: float = 60) -> dict[str, str]:
    """Wait until the job is pending and its image is on the shared file system; return its fields from scontrol."""
    cluster.wait_for_state(job, "PENDING", timeout_s=timeout_s)
    wait_until(
        f"the image of job {job} is shared",
        lambda: cluster.run("login", "sh", "-c", f"ls -d {SHARED}/images/*.{job}/[0-9][0-9][0-9][0-9]").stdout,
        timeout_s=timeout_s,
    )
    return cluster.job(job)


def asleep(cluster: Cluster, script: str, *options: str, user: str = "alice", after: str = "step number=2") -> str:
    """Submit a job, suspend it once it has written ``after``, and return its ID."""
    job = cluster.submit(*options, script=script, user=user)
    cluster.wait_for_output(job, after, user=user)
    suspend(cluster, job, user)
    wait_asleep(cluster, job)
    return job


def wait_for_no_images(cluster: Cluster, job: str) -> None:
    """Wait until no store contains an image or a note of the job."""
    listing = f"ls -d {SHARED}/images/*.{job} {LOCAL}/images/*.{job} {SHARED}/asleep/*.{job}.json"
    for node in GPU_NODES:
        wait_until(
            f"the images of job {job} are gone from {node}",
            lambda node=node: cluster.run(node, "sh", "-c", listing).stdout,  # type: ignore[misc]
            lambda seen: seen == "",
            timeout_s=120,
        )


def status(cluster: Cluster, job: str, user: str = "alice") -> dict[str, Any]:
    """Return the output of ``slurm-affinode status`` for one job; empty if there is nothing to show."""
    text = cluster.run("login", "slurm-affinode", "status", job, "--json", user=user).stdout
    value: dict[str, Any] = json.loads(text or "{}")
    return value


def end(cluster: Cluster, job: str, user: str = "alice") -> None:
    """End a job that idles with ``UNTIL_FINISH``."""
    cluster.exec("login", "touch", f"/home/{user}/slurm-{job}-end.out", user=user)


def finish(cluster: Cluster, job: str, user: str = "alice", timeout_s: float = 90) -> str:
    """End an ``idle_job``, and wait until it has completed with intact memory; return its output."""
    end(cluster, job, user)
    cluster.wait_for_state(job, "COMPLETED", timeout_s=timeout_s)
    output = cluster.output(job, user)
    assert "memory=intact" in output, output
    return output


def journals(cluster: Cluster, node: str) -> list[str]:
    """Return the last phase of each open journal of a node."""
    text = cluster.run(node, "sh", "-c", f"tail -qn 1 {LOCAL}/journal/*.jsonl").stdout
    return [json.loads(line)["phase"] for line in text.splitlines() if line.startswith("{")]


def wait_for_phase(cluster: Cluster, node: str, phase: str, timeout_s: float = 60) -> None:
    """Wait until an open journal of the node has reached the phase."""
    wait_until(f"{node} is {phase}", lambda: journals(cluster, node), lambda seen: phase in seen, timeout_s=timeout_s)


def agent_pid(cluster: Cluster, node: str) -> int:
    """Return the PID of the node's agent."""
    return int(cluster.exec(node, "cat", "/run/slurm-affinode-agent.pid"))


def kill_agent(cluster: Cluster, node: str) -> None:
    """Kill the agent, and wait until it has been restarted, which takes half a second."""
    before = agent_pid(cluster, node)
    cluster.shell(node, f"kill -KILL {before}")
    wait_until("the agent is restarted", lambda: agent_pid(cluster, node), lambda pid: pid != before)


def wait_for_agents(cluster: Cluster) -> None:
    """Wait until the agents of all GPU nodes respond."""
    for node in GPU_NODES:
        wait_until(
            f"the agent of {node} responds",
            lambda node=node: cluster.run(node, "/usr/bin/python3", "-ISc", ASK_AGENT).returncode,  # type: ignore[misc]
            lambda code: code == 0,
        )


def wait_for_nodes(cluster: Cluster) -> None:
    """Wait until slurmctld responds and its nodes have registered."""
    known = {"idle", "mixed", "allocated", "planned", "completing"}
    wait_until(
        "the nodes are registered",
        lambda: cluster.run("login", "sinfo", "--Node", "--noheader", "--format=%T").stdout,
        lambda printed: bool(printed) and set(printed.split()) <= known,
    )


@contextmanager
def configured(cluster: Cluster, nodes: tuple[str, ...] = GPU_NODES, **suspend_keys: object) -> Iterator[None]:
    """Run agents with these keys in ``[suspend]`` of their configuration while the context lasts."""
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in suspend_keys.items())
    drop = "|".join(suspend_keys)
    for node in nodes:
        cluster.shell(
            node,
            'cp -n "$1" "$1.before"; grep -vE "^($3) = " "$1.before" >"$1"; printf "%s" "$2" >>"$1"',
            CONFIG, lines, drop,
        )  # fmt: skip
        kill_agent(cluster, node)
    wait_for_agents(cluster)
    try:
        yield
    finally:
        for node in nodes:
            cluster.shell(node, 'mv "$1.before" "$1"', CONFIG)
            kill_agent(cluster, node)
        wait_for_agents(cluster)


@contextmanager
def pausing_criu(cluster: Cluster, **suspend_keys: object) -> Iterator[None]:
    """Run agents with ``PAUSING_CRIU`` and these keys in ``[suspend]``."""
    for node in GPU_NODES:
        cluster.exec(
            node,
            "sh",
            "-c",
            "cat >/usr/local/sbin/criu-pausing && chmod 0755 /usr/local/sbin/criu-pausing",
            stdin=PAUSING_CRIU,
        )
    try:
        with configured(cluster, criu="/usr/local/sbin/criu-pausing", **suspend_keys):
            yield
    finally:
        for node in GPU_NODES:
            cluster.shell(node, "rm -f /run/criu-hold-* /run/criu-held-*")


def hold_criu(cluster: Cluster, node: str, when: str, verb: str) -> None:
    """Pause the next CRIU ``before`` or ``after`` its work."""
    cluster.shell(node, f"rm -f /run/criu-held-{when}-{verb}; touch /run/criu-hold-{when}-{verb}")


def wait_for_held_criu(cluster: Cluster, node: str, when: str, verb: str) -> None:
    """Wait until CRIU is paused ``before`` or ``after`` its work."""
    wait_until(
        f"criu {verb} is paused {when} its work",
        lambda: cluster.run(node, "test", "-e", f"/run/criu-held-{when}-{verb}").returncode == 0,
    )


def continue_criu(cluster: Cluster, node: str) -> None:
    """Continue the paused CRIU."""
    cluster.shell(node, "rm -f /run/criu-hold-*")
