"""Cost of the agent on a node: share of a core, and memory, with eight GPUs, each allocated to an idle watched job.

The agent runs in a process of its own, with constant values instead of NVML (``--nvml real`` uses the node's driver), a
shepherd for each job, and a queue of a thousand jobs for the pressure policy. Its CPU time is read from /proc.

    benchmarks/bench_agent.py --seconds 60

Goal at a period of 5 s: less than 0.5 % of a core and less than 80 MB. Prolog and epilog are compared with the start of
an interpreter that does nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ratios import MISSED, report

GPUS = 8
GOAL_CPU_PCT = 0.5
GOAL_RSS_MB = 80.0
TICKS = os.sysconf("SC_CLK_TCK")

AGENT = r"""
import sys
sys.path[:0] = [sys.argv[3]]
from slurm_affinode.cli import agent as _command  # what the command imports is counted
from slurm_affinode.agent import daemon, systemd, composition as orchestration  # counted too
from slurm_affinode.suspension.job.peers import Identity, Inspector
from slurm_affinode.base.config import load
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.slurm.client import open_client  # counted too
from agent_stand_ins import Acts, Gpus, Slurm, job, waiting
from slurm_affinode.suspension.interface import Orchestration

count, real = int(sys.argv[1]), sys.argv[2] == "real"
jobs = {100 + at: job(100 + at) for at in range(count)} | {1000 + at: waiting(1000 + at) for at in range(1000)}
seen = {}

def identify(peer):
    job_id = seen.setdefault(peer.pid, 100 + len(seen))
    return Identity(job_id, peer.uid, peer.gid, peer.pid, Inspector().started(peer.pid) or 0)

def build(context):
    acts = Acts(context)
    return Orchestration(acts, acts, acts, acts)

systemd.log_to_stderr(verbose=False)
config = load()
gpu = NvmlDriver if real else lambda: Gpus(count)
parts = daemon.DaemonParts(gpu, Slurm(jobs).client, build, identify)
served = daemon.Daemon(config, parts)
served.service.gpu_indices.update({100 + at: (at,) for at in range(count)})
import signal
signal.signal(signal.SIGTERM, lambda *_: served.end())
served.start()
served.run()
served.stop()
"""

SHEPHERD = r"""
import array, socket, sys, time
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1] + "/shepherd.sock")
text = f"hello\nversion=1\njob={sys.argv[2]}\nrestarts=0\nimage=0\nroot=2\noption=window=86400,when=pressure"
sock.sendmsg([text.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
print("there", flush=True)
sys.stdin.read()
"""


def usage_of(pid: int) -> tuple[float, float]:
    """Return CPU seconds so far, and the current memory in MB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = int(status.partition("VmRSS:")[2].split()[0])
    return (int(fields[11]) + int(fields[12])) / TICKS, rss_kib * 1024 / 1e6


def wait_for(path: Path, seconds: float = 30.0) -> None:
    """Wait until a socket accepts connections."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.05)
    sys.exit(f"{path}: no process listens on this socket")


def hooks_ratio(run_dir: Path, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a prolog with the agent, and the ratio to an interpreter that does nothing."""
    env = {**os.environ, "SLURM_JOB_ID": "100", "SLURM_JOB_UID": "1000", "SLURM_JOB_GPUS": "0"}
    hook = "import sys; sys.argv = ['slurm-affinode', 'prolog']; from slurm_affinode.cli.entry import main; main()"
    bare, full = [], []
    for _ in range(rounds):
        for code, times in (("pass", bare), (hook, full)):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], env=env, check=True)
            times.append(time.perf_counter() - began)
    return statistics.median(full), statistics.median(full) / statistics.median(bare)


def main() -> int:
    """Measure; return ``MISSED`` if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the measurement")
    parser.add_argument("--period", default="5s")
    parser.add_argument("--nvml", choices=("values", "real"), default="values")
    parser.add_argument("--rounds", type=int, default=15, help="number of prologs")
    options = parser.parse_args()
    tests = Path(__file__).resolve().parents[1] / "tests"
    with tempfile.TemporaryDirectory(prefix="bench-agent-") as directory:
        run_dir = Path(directory) / "run"
        config = Path(directory) / "config.toml"
        config.write_text(f'[agent]\nnode = "c1"\nperiod = "{options.period}"\nrun_dir = "{run_dir}"\nlisten = ""\n')
        os.environ["SLURM_AFFINODE_CONFIG"] = str(config)
        agent = subprocess.Popen([sys.executable, "-c", AGENT, str(GPUS), options.nvml, str(tests)])
        shepherds = []
        try:
            wait_for(run_dir / "control.sock")
            for at in range(GPUS):
                shepherd = subprocess.Popen(
                    [sys.executable, "-S", "-c", SHEPHERD, str(run_dir), str(100 + at)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )  # fmt: skip
                shepherds.append(shepherd)
                assert shepherd.stdout is not None
                shepherd.stdout.readline()
            time.sleep(2 * float(options.period.removesuffix("s")))
            before, began = usage_of(agent.pid)[0], time.monotonic()
            time.sleep(options.seconds)
            after, rss_mb = usage_of(agent.pid)
            cpu_pct = 100 * (after - before) / (time.monotonic() - began)
            prolog_s, ratio = hooks_ratio(run_dir, options.rounds)
        finally:
            agent.terminate()
            agent.wait(30)
            for shepherd in shepherds:
                shepherd.terminate()
                shepherd.communicate()
    print(f"agent, {GPUS} GPUs, a sample every {options.period}: {cpu_pct:.2f} % of a core (goal {GOAL_CPU_PCT}), "
          f"{rss_mb:.0f} MB (goal {GOAL_RSS_MB:.0f})")  # fmt: skip
    print(f"prolog: {1000 * prolog_s:.0f} ms, {ratio:.1f} times an interpreter that does nothing")
    report(prolog_to_interpreter=ratio)
    return MISSED if cpu_pct > GOAL_CPU_PCT or rss_mb > GOAL_RSS_MB else 0


if __name__ == "__main__":
    sys.exit(main())
