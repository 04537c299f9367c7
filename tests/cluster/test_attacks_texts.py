"""Attacks by texts that owners choose: names of processes that reach a terminal, comments that count for a limit."""

from __future__ import annotations

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import BY_HAND, NOT_CONNECTED, NOT_YET, configured, end, idle_job, wait_asleep, wait_for_agents
from cluster.test_suspend_kinds import IDLE, ON_C1

pytestmark = pytest.mark.cluster

ESCAPES = r"""
import ctypes, socket, time
held = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
ctypes.CDLL(None).prctl(15, b"\x1b[31mred\r\n", 0, 0, 0)
print("named", flush=True)
time.sleep(1000)
"""


def test_name_of_a_process_sends_nothing_to_a_terminal(cluster: Cluster) -> None:
    """The name is part of the reason against a suspension, which administrators and the owner see."""
    wait_for_agents(cluster)
    job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\npython3 -c '{ESCAPES}' &\n{IDLE}\nkill %1\n")
    cluster.wait_for_output(job, "named")
    cluster.wait_for_output(job, "step number=1")
    refused = wait_until(
        "it is refused",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job),
        lambda done: NOT_YET not in done.stderr and NOT_CONNECTED not in done.stderr,
    )
    shown = wait_until(
        "its status has the reason",
        lambda: cluster.run("login", "slurm-affinode", "status", job),
        lambda done: "socket-kind" in done.stdout,
    )
    for text in (refused.stdout + refused.stderr, shown.stdout + shown.stderr):
        assert "[31mred" in text
        assert not {"\x1b", "\r"} & set(text)
    end(cluster, job)
    cluster.wait_for_state(job, "COMPLETED")


def test_forged_comments_do_not_use_up_the_limit_of_others(cluster: Cluster) -> None:
    """Held jobs whose comments say that they are suspended; the limit counts only what the agents have signed."""
    with configured(cluster, **{"partitions.gpu.max_suspended": 1}):
        for _ in range(3):
            cluster.submit("--hold", "--partition=gpu", "--comment=suspended: idle 20m", wrap="true", user="bob")
        option = "--gpu-suspend-idle=5s,when=always,wake=hold"
        first = cluster.submit(script=idle_job("--nodelist=c1", option, busy=0, idle=120))
        wait_asleep(cluster, first)
        second = cluster.submit(script=idle_job("--nodelist=c1", option, busy=0, idle=120))
        wait_until(
            "the limit counts the first one",
            lambda: cluster.run("login", "slurm-affinode", "status", second, user="alice").stdout,
            lambda text: "1 jobs of partition gpu are suspended; the site allows 1" in text,
        )
