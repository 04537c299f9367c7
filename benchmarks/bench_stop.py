"""Time for which a job is stopped before it is dumped, and when its suspension is refused at that point.

    python benchmarks/bench_stop.py          as root

A tree of 4 processes, and one of 200, are stopped, held and examined again as for a suspension, and then resumed as by
a rollback. Peer, in the same run, with the same tree: SIGSTOP to every process, until the kernel reports all as
stopped, and SIGCONT. Targets: the stop adds less than 50 ms to the suspension of the small tree, and each tree has been
stopped for less than a second when it is refused.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ratios import MISSED, report
from trees import OWNER, namespace

from slurm_affinode.base.pidfd import Id, Process
from slurm_affinode.checkpoint.criu.kernel_states import lost
from slurm_affinode.checkpoint.inspection import collect
from slurm_affinode.suspension.job.process_tree import LinuxProcesses, Member, StoppedJob
from slurm_affinode.suspension.refusals import of_tree

ADDED_MS, REFUSED_MS = 50.0, 1000.0
SLEEPERS = "import os, time\nfor _ in range({}):\n    if os.fork() == 0: break\ntime.sleep(1000)"


def main() -> int:
    """Run the rounds; return ``MISSED`` if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("not measured: it needs root")
        return 0
    missed, ratios = False, {}
    with tempfile.TemporaryDirectory() as name:
        for count in (4, 200):
            added, refused, peer = _measured(Path(name), count, options.rounds)
            target = f", target {ADDED_MS:g} ms" if count == 4 else ""
            print(f"{count} processes: stopped, held and examined in {added:.1f} ms{target}; refused and running again"
                  f" after {refused:.1f} ms (target {REFUSED_MS:g} ms), {refused / peer:.1f} times SIGSTOP and SIGCONT"
                  f" alone ({peer:.1f} ms)")  # fmt: skip
            ratios[f"{count}_to_signals"] = refused / peer
            missed |= refused >= REFUSED_MS or (count == 4 and added >= ADDED_MS)
    report(**ratios)
    return MISSED if missed else 0


def _measured(work: Path, count: int, rounds: int) -> tuple[float, float, float]:
    """Return the medians in milliseconds: until examined, until running again, and of signals alone."""
    processes, added, refused, peer = LinuxProcesses(), [], [], []
    with namespace(work) as pid:
        init = Process(pid).id
        enter = ["nsenter", f"--target={pid}", "--pid", "--mount", "--", "setpriv", f"--reuid={OWNER.uid}",
                 f"--regid={OWNER.gid}", "--clear-groups", sys.executable, "-c"]  # fmt: skip
        with subprocess.Popen([*enter, SLEEPERS.format(count - 1)]) as outer:
            try:
                while len(tree := processes.members(*init)) < count:
                    time.sleep(0.01)
                for _ in range(rounds):
                    began = time.monotonic()
                    stop = StoppedJob(processes, init)
                    stop.stop(timeout_s=60, examine=_examine)
                    of_tree(collect(pid, min(tree, key=lambda member: member.pid_ns).pid), (), OWNER)
                    added.append(time.monotonic() - began)
                    stop.release()
                    processes.resume(processes.all_processes(*init))
                    refused.append(time.monotonic() - began)
                    peer.append(_signals_alone(processes, init, tree))
            finally:
                outer.kill()
                processes.end(*init, timeout_s=10)
    return tuple(1000 * statistics.median(series) for series in (added, refused, peer))  # type: ignore[return-value]


def _examine(process: Process) -> None:
    lost(process)


def _signals_alone(processes: LinuxProcesses, init: Id, tree: Sequence[Member]) -> float:
    """Stop the processes with signals, and continue them; return the seconds."""
    began = time.monotonic()
    for process in tree:
        os.kill(process.pid, signal.SIGSTOP)
    while any(member.state != "T" for member in processes.members(*init)):
        pass
    for process in tree:
        os.kill(process.pid, signal.SIGCONT)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
