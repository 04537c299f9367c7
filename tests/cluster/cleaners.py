"""Run clean-up as an administrator, with a database, a policy and a mail program for the test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cleanup_samples import rules
from cluster.driver import WORKLOADS, Cluster, wait_until

STATE = "/var/lib/zombies"
LIVE = ("--live", "--prometheus", "http://prometheus:9090", "--window", "4s")
STAGES = ("4s", "5s", "6s")
POLICY = f"""
{rules(fixed=STAGES, sliding=STAGES, grace="0s")}
[mail]
via = "command"
command = ["{STATE}/mail", "{{to}}"]
address = "{{user}}@example.org"
admins = ["ops@example.org"]
"""
RESUME = '\n[[rule]]\nkinds = ["drained-kill-failed"]\naction = "resume"\ngrace = "0s"\n'
MAIL = "#!/bin/sh\nexec cat > /var/lib/zombies/mail-$1-$(date +%s%N)\n"
ON_C1 = ("--partition=gpu", "--nodelist=c1", "--gres=gpu:1")
SQUATTER = f"exec {WORKLOADS}/squatter.py --memory-mib 60000"


@contextmanager
def administrator(cluster: Cluster) -> Iterator[None]:
    """Set up a database, a policy and a mail program for the test on the login node."""
    cluster.shell("login", f"rm -rf {STATE}; mkdir -p {STATE}")
    cluster.shell("login", f"cat > {STATE}/policy.toml <<'X'\n{POLICY}\nX")
    cluster.shell("login", f"cat > {STATE}/mail <<'X'\n{MAIL}X\nchmod +x {STATE}/mail")
    yield
    cluster.shell("login", f"rm -rf {STATE}")


def allow_resuming(cluster: Cluster) -> None:
    """Configure the policy to resume nodes that Slurm itself has drained."""
    cluster.shell("login", f"cat >> {STATE}/policy.toml <<'X'\n{RESUME}\nX")


def run(cluster: Cluster, *words: str, user: str = "root", **env: str) -> subprocess.CompletedProcess[str]:
    settings = [f"{name}={value}" for name, value in env.items()]
    return cluster.run("login", "env", *settings, "slurm-affinode", *words, user=user)


def zombies(cluster: Cluster, *words: str, **env: str) -> dict[str, Any]:
    """Return the JSON output of a command, with its exit status in ``status``."""
    policy = ("--policy", f"{STATE}/policy.toml") if words[0] in ("clean", "warn") else ()
    done = run(cluster, "zombies", *words, *policy, "--state", STATE, "--json", **env)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    return {**record, "status": done.returncode} if isinstance(record, dict) else {"rows": record}


def about(assessment: dict[str, Any], job: str) -> list[tuple[str, str]]:
    return [(action["verb"], action["result"]) for action in assessment["actions"] if action["job"] == job]


def squatting(
    cluster: Cluster, *options: str, script: str = SQUATTER, user: str = "alice", where: tuple[str, ...] = ON_C1
) -> str:
    """Submit a job that holds an idle GPU and wait until it is listed; return its ID."""
    job = cluster.submit(*where, *options, wrap=script, user=user)
    wait_until(
        f"job {job} is found",
        lambda: [finding["subject"].get("id") for finding in zombies(cluster, "list", *LIVE)["findings"]],
        lambda ids: job in ids,
    )
    return job


def clean(cluster: Cluster, *words: str, **env: str) -> dict[str, Any]:
    return zombies(cluster, "clean", *LIVE, "--warn", "--yes", *words, **env)


def until(cluster: Cluster, job: str, verb: str, *words: str, **env: str) -> dict[str, Any]:
    """Run the timer's command until it takes an action on the job; return its output."""
    return wait_until(
        f"{verb} of job {job}",
        lambda: clean(cluster, *words, **env),
        lambda result: any(v == verb for v, _ in about(result, job)),
    )


def scancel(cluster: Cluster, text: str) -> dict[str, str]:
    """Install a fake scancel; return the environment in which it is found."""
    path = f"{STATE}/bin/scancel"
    cluster.shell("login", f"mkdir {STATE}/bin; cat > {path} <<'X'\n#!/bin/sh\n{text}\nX\nchmod +x {path}")
    return {"PATH": f"{STATE}/bin:/usr/local/bin:/usr/bin:/bin", "SLURM_AFFINODE_SLURM_BACKEND": "commands"}


def history(cluster: Cluster, job: str) -> list[tuple[str, str]]:
    rows = zombies(cluster, "history", "--job", job)["rows"]
    return [(row["verb"], row["result"]) for row in rows if row["verb"] != "tell"]


def mails(cluster: Cluster) -> list[str]:
    return cluster.shell("login", f"ls {STATE} | grep ^mail- || true").split()
