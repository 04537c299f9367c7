"""Cost of --gpu-suspend-idle at submission and at the start of a job: differences in one run, on the cluster.

    CLUSTER_NAME=affinode-2411 python benchmarks/bench_spank.py --rounds 30 --json

Submission: the wall time of ``sbatch --test-only`` (everything but the job itself) on the login node, without the
plugin, with the plugin loaded, and with the option. Start: from the creation of the output file, which slurmstepd
creates just before it forks the task, to the first line of the script, both by the node's clock, without and with the
option. Rounds alternate, and medians are compared.

The cluster must run (containers/cluster up) and be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

CLUSTER = Path(__file__).resolve().parents[1] / "containers" / "cluster"
OUTPUT = "/run/bench-spank/out"
SUBMISSION_LIMIT_MS = 5.0
START_LIMIT_MS = 50.0

# Runs on the login node. Prints milliseconds: without the plugin, with the plugin loaded, with the option.
SUBMIT = r"""
import json, os, subprocess, sys, time
rounds = int(sys.argv[1])
ways = {
    "no_plugin": ({"SLURM_CONF": "/tmp/bench-spank/slurm.conf"}, []),
    "loaded": ({}, []),
    "option": ({}, ["--gpu-suspend-idle=15m,util=5,signal=USR1@60"]),
}
delays_ms = {name: [] for name in ways}
for _ in range(rounds):
    for name, (more, options) in ways.items():
        began = time.perf_counter()
        subprocess.run(["sbatch", "--test-only", *options, "--wrap=true"], env={**os.environ, **more},
                       check=True, capture_output=True)
        delays_ms[name].append((time.perf_counter() - began) * 1000)
print(json.dumps(delays_ms))
"""


def on(node: str, *argv: str, user: str = "root", stdin: str = "") -> str:
    """Return the output of a command on a node."""
    done = subprocess.run(
        (str(CLUSTER), "exec", "--user", user, node, *argv),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"bench_spank: {node}$ {' '.join(argv[:3])}: {done.stderr.strip()[-400:]}")
    return done.stdout


def measure_submission(rounds: int) -> dict[str, float]:
    """Return medians in milliseconds."""
    copy = (
        "mkdir -p /tmp/bench-spank && cp /etc/slurm/*.conf /tmp/bench-spank/ && "
        "sed -i s,/etc/slurm/,/tmp/bench-spank/,g /tmp/bench-spank/slurm.conf && : >/tmp/bench-spank/plugstack.conf && "
        "rm -f /tmp/bench-spank/slurmdbd.conf && chmod -R a+rX /tmp/bench-spank"
    )
    on("login", "sh", "-c", copy)
    delays_ms = json.loads(on("login", "python3", "-c", SUBMIT, str(rounds), user="alice"))
    return {name: statistics.median(values) for name, values in delays_ms.items()}


def measure_start(rounds: int) -> dict[str, float]:
    """Return medians in milliseconds from the creation of the output file to the first line of the script."""
    delays_ms: dict[str, list[float]] = {"without": [], "with_option": []}
    script = "#!/bin/bash\necho $EPOCHREALTIME\n"
    on("c1", "install", "-d", "-m", "1777", str(Path(OUTPUT).parent))
    for _ in range(rounds):
        for name, options in (("without", ()), ("with_option", ("--gpu-suspend-idle=15m",))):
            argv = (
                "sbatch",
                "--parsable",
                "--wait",
                "--partition=gpu",
                "--nodelist=c1",
                f"--output={OUTPUT}",
            )
            on("login", *argv, *options, user="alice", stdin=script)
            written = float(on("c1", "cat", OUTPUT))
            # slurmstepd opens the output file just before it forks the task; the script's line is its first write.
            opened = float(on("c1", "stat", "--format=%.6W", OUTPUT))
            on("c1", "rm", "-f", OUTPUT)
            delays_ms[name].append((written - opened) * 1000)
    return {name: statistics.median(values) for name, values in delays_ms.items()}


def main() -> int:
    """Measure and print; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    submission, start = measure_submission(options.rounds), measure_start(options.rounds)
    result = {
        "cluster": os.environ.get("CLUSTER_NAME", "the default"),
        "rounds": options.rounds,
        "submission_ms": {name: round(value, 2) for name, value in submission.items()},
        "submission_overhead_ms": round(submission["option"] - submission["no_plugin"], 2),
        "start_ms": {name: round(value, 2) for name, value in start.items()},
        "start_overhead_ms": round(start["with_option"] - start["without"], 2),
    }
    met = result["submission_overhead_ms"] < SUBMISSION_LIMIT_MS and result["start_overhead_ms"] < START_LIMIT_MS
    if options.json:
        print(json.dumps({**result, "met": met}, indent=2))
    else:
        print(f"submission: {result['submission_ms']} ms, with the option {result['submission_overhead_ms']:+} ms")
        print(f"start:      {result['start_ms']} ms, with the option {result['start_overhead_ms']:+} ms")
        print(f"limits {SUBMISSION_LIMIT_MS:g} and {START_LIMIT_MS:g} ms: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
