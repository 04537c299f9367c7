"""Jobs that are suspended, and the agents that do it, as stories need them."""

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
BY_HAND = "--gpu-suspend-idle=1h,when=always,wake=hold"
"""Nothing happens by itself: neither a suspension nor a release."""

# A criu that can be stopped before or after its work: while /run/criu-hold-WHEN-VERB exists, it waits there.
PAUSING_CRIU = r"""#!/bin/bash
verb=
for word in "$@"; do case "$word" in dump|restore) verb=$word ;; esac; done
gate() {
  [ -e "/run/criu-hold-$1-$verb" ] || return 0
  touch "/run/criu-held-$1-$verb"
  while [ -e "/run/criu-hold-$1-$verb" ]; do sleep 0.02; done
}
gate before
criu "$@"
status=$?
gate after
exit "$status"
"""


def idle_job(*options: str, busy: float = 1, idle: float = 5, more: str = "") -> str:
    """A script that computes, idles in counted steps, and checks its host and device memory at its end."""
    head = "".join(f"#SBATCH {option}\n" for option in ("--partition=gpu", "--gres=gpu:1", *options))
    return f"#!/bin/bash\n{head}{WORKLOADS}/idle_after.py --busy {busy} --idle {idle} --again 1 {more}\n"


def steps(output: str) -> list[int]:
    """The idle steps that a job has counted, in the order in which it wrote them."""
    return [int(number) for number in re.findall(r"step number=(\d+)", output)]


def suspend(cluster: Cluster, job: str, user: str = "alice") -> None:
    """By hand, from the login node; returns when the job's tree is gone.

    The agent does not ask slurmctld at once about each job that has just begun: until it has, it says so. And each run
    lasts for ``min_run`` and ``backoff``.
    """
    done = wait_until(
        f"slurmctld has told the agent of job {job}",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job, user=user),
        lambda done: not any(text in done.stderr for text in ("has not said anything", "cannot be suspended yet")),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def wake(cluster: Cluster, job: str, user: str = "alice") -> None:
    """By hand, from the login node, as soon as its agent has done the last of its suspension."""
    done = wait_until(
        f"the suspension of job {job} is done",
        lambda: cluster.run("login", "slurm-affinode", "wake", job, user=user),
        lambda done: "is not suspended yet" not in done.stderr,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def wait_asleep(cluster: Cluster, job: str, timeout_s: float = 60) -> dict[str, str]:
    """Waits until the job is in the queue and its image on the shared file system; what scontrol says of it."""
    cluster.wait_for_state(job, "PENDING", timeout_s=timeout_s)
    wait_until(
        f"the image of job {job} is shared",
        lambda: cluster.run("login", "sh", "-c", f"ls -d {SHARED}/images/*.{job}/[0-9][0-9][0-9][0-9]").stdout,
        timeout_s=timeout_s,
    )
    return cluster.job(job)


def asleep(cluster: Cluster, script: str, *options: str, user: str = "alice", after: str = "step number=2") -> str:
    """Submits a job, suspends it by hand when it has written ``after``; its id."""
    job = cluster.submit(*options, script=script, user=user)
    cluster.wait_for_output(job, after, user=user)
    suspend(cluster, job, user)
    wait_asleep(cluster, job)
    return job


def wait_for_no_images(cluster: Cluster, job: str) -> None:
    """Waits until nothing of the job is left in a store."""
    listing = f"ls -d {SHARED}/images/*.{job} {LOCAL}/images/*.{job} {SHARED}/asleep/*.{job}.json"
    for node in GPU_NODES:
        wait_until(
            f"the images of job {job} are gone from {node}",
            lambda node=node: cluster.run(node, "sh", "-c", listing).stdout,  # type: ignore[misc]
            lambda seen: seen == "",
            timeout_s=120,
        )


def status(cluster: Cluster, job: str, user: str = "alice") -> dict[str, Any]:
    """What ``slurm-affinode status`` says of one job; empty where it has nothing to show."""
    text = cluster.run("login", "slurm-affinode", "status", job, "--json", user=user).stdout
    value: dict[str, Any] = json.loads(text or "{}")
    return value


def finish(cluster: Cluster, job: str, user: str = "alice", timeout_s: float = 90) -> str:
    """Waits until the job has completed with intact memory; all that it has written."""
    cluster.wait_for_state(job, "COMPLETED", timeout_s=timeout_s)
    output = cluster.output(job, user)
    assert "memory=intact" in output, output
    return output


def journals(cluster: Cluster, node: str) -> list[str]:
    """The phases in which the open journals of a node end."""
    text = cluster.run(node, "sh", "-c", f"tail -qn 1 {LOCAL}/journal/*.jsonl").stdout
    return [json.loads(line)["phase"] for line in text.splitlines() if line.startswith("{")]


def wait_for_phase(cluster: Cluster, node: str, phase: str, timeout_s: float = 30) -> None:
    """Waits until the node's journal says so."""
    wait_until(f"{node} is {phase}", lambda: journals(cluster, node), lambda seen: phase in seen, timeout_s=timeout_s)


def agent_pid(cluster: Cluster, node: str) -> int:
    """The PID of the node's agent."""
    return int(cluster.exec(node, "cat", "/run/slurm-affinode-agent.pid"))


def kill_agent(cluster: Cluster, node: str) -> None:
    """SIGKILL, as the kernel does it when memory runs out. It is started again half a second later."""
    before = agent_pid(cluster, node)
    cluster.shell(node, f"kill -KILL {before}")
    wait_until("another agent is there", lambda: agent_pid(cluster, node), lambda pid: pid != before)


def wait_for_agents(cluster: Cluster) -> None:
    """Waits until the agents of all nodes with GPUs answer."""
    for node in GPU_NODES:
        wait_until(
            f"the agent of {node} answers",
            lambda node=node: cluster.run(node, "slurm-affinode", "status", "--node", node, "--json").returncode,  # type: ignore[misc]
            lambda code: code == 0,
        )


def wait_for_nodes(cluster: Cluster) -> None:
    """slurmctld is there again, and has heard of its nodes."""
    known = {"idle", "mixed", "allocated", "planned", "completing"}
    wait_until(
        "the nodes answer",
        lambda: cluster.run("login", "sinfo", "--Node", "--noheader", "--format=%T").stdout,
        lambda said: bool(said) and set(said.split()) <= known,
    )


@contextmanager
def configured(cluster: Cluster, nodes: tuple[str, ...] = GPU_NODES, **suspend_keys: object) -> Iterator[None]:
    """Agents with other keys in ``[suspend]`` of their configuration while the context lasts."""
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
    """Agents that use ``PAUSING_CRIU``, with other keys of their configuration, too."""
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
    """The next criu waits ``before`` or ``after`` its work."""
    cluster.shell(node, f"rm -f /run/criu-held-{when}-{verb}; touch /run/criu-hold-{when}-{verb}")


def wait_for_held_criu(cluster: Cluster, node: str, when: str, verb: str) -> None:
    """Waits until it does."""
    wait_until(
        f"criu {verb} waits {when} its work",
        lambda: cluster.run(node, "test", "-e", f"/run/criu-held-{when}-{verb}").returncode == 0,
    )


def let_criu_go(cluster: Cluster, node: str) -> None:
    """It goes on."""
    cluster.shell(node, "rm -f /run/criu-hold-*")
