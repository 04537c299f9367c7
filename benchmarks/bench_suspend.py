"""Time from the end of the idle window until another job runs on the GPU, without the dump.

    python benchmarks/bench_suspend.py --cluster NAME [--release 24.11]

Runs on the cluster in containers (containers/cluster up), whose agents sample every second. In each round a job
computes and becomes idle while another one waits for its GPU. The window ends WINDOW seconds after the job has recorded
that it stopped computing; the other job records its start; the agents' ledger has the duration of the dump. Target: a
median below 5 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cluster.driver import Cluster, wait_until

TARGET_S = 5.0
WINDOW_S = 3
LEDGER = "/shared/slurm-affinode/ledger"


def main() -> int:
    """Run the rounds; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, metavar="NAME")
    parser.add_argument("--release", default="24.11")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-mib", type=int, default=1024, help="GPU memory of the idle job")
    options = parser.parse_args()
    cluster = Cluster(options.cluster, options.release)
    outcomes = [_round(cluster, options.memory_mib) for _ in range(options.rounds)]
    for outcome in outcomes:
        print(f"  window reached -> other job runs: {outcome.total_s:5.2f} s: decision {outcome.decided_s:5.2f}, "
              f"dump {outcome.dump_s:5.2f}, rest of the suspension {outcome.rest_s:5.2f}, "
              f"until Slurm has started the other {outcome.started_s:5.2f}")  # fmt: skip
    median_s = statistics.median(outcome.total_s - outcome.dump_s for outcome in outcomes)
    verdict = "below" if median_s < TARGET_S else "MISSED:"
    print(f"median without the dump: {median_s:.2f} s, {verdict} {TARGET_S:g} s")
    return 0 if median_s < TARGET_S else 1


@dataclass(frozen=True)
class Round:
    """Return seconds: from the window to the agent's decision, of the dump, of the rest until the job is requeued, and
    from there to the first line of the other job."""

    decided_s: float
    dump_s: float
    rest_s: float
    started_s: float

    @property
    def total_s(self) -> float:
        """Total from the window to the first line of the other job."""
        return self.decided_s + self.dump_s + self.rest_s + self.started_s


def _round(cluster: Cluster, memory_mib: int) -> Round:
    cluster.clear()
    command = f"/usr/local/share/workloads/idle_after.py --busy 2 --idle 600 --memory-mib {memory_mib}"
    option = f"--gpu-suspend-idle={WINDOW_S}s,wake=hold"
    job = cluster.submit("--partition=gpu", "--nodelist=c1", "--gres=gpu:2", option, wrap=command)
    cluster.wait_for_output(job, "busy")
    other = cluster.submit(
        "--partition=gpu", "--nodelist=c1", "--gres=gpu:2", wrap="echo started $(date +%s.%N); sleep 1", user="bob"
    )
    started = _stamp(cluster.wait_for_output(other, "started", user="bob", timeout_s=120), "started", after=True)
    idle = _stamp(cluster.output(job), "idle seconds")
    entry = wait_until("the ledger has the suspension", lambda: _ledger(cluster, job), timeout_s=60)
    cluster.clear()
    began, queued = entry["began_ms"] / 1000, entry["queued_ms"] / 1000
    dump_s = (entry["dumped_ms"] - entry["parked_ms"]) / 1000
    return Round(began - (idle + WINDOW_S), dump_s, queued - began - dump_s, started - queued)


def _stamp(output: str, word: str, *, after: bool = False) -> float:
    line = next(line for line in output.splitlines() if word in line)
    return float(line.split()[1 if after else 0])


def _ledger(cluster: Cluster, job: str) -> dict[str, int]:
    lines = cluster.shell("c1", f"cat {LEDGER}/*.jsonl").splitlines()
    entries = [json.loads(line) for line in lines]
    dumps = [entry for entry in entries if entry["job_id"] == int(job) and "dumped_ms" in entry]
    return dumps[-1] if dumps else {}


if __name__ == "__main__":
    sys.exit(main())
