"""Run benchmarks, all by default: ``python -m benchmarks [PROGRAM]...``. Ratios come from one run on this machine.

A full run compares its ratios with those in ``benchmarks/results``, and replaces them. A ratio that is 1.3 times as
large is a failure, and the kept ones stay unless ``--accept`` is given. ``--quick`` uses little data: it shows that the
benchmarks work, and measures nothing; only errors count. With ``--cluster NAME``, programs that need CRIU run in a
compute container of that cluster.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ratios

HERE = Path(__file__).resolve().parent
FULL = {
    "bench_sacct.py": ("--records", "1000000"),
    "bench_triage.py": ("--mib", "1024"),
    "bench_join.py": ("--samples", "100000000", "--allocations", "265000"),
    "bench_scale.py": ("--samples", "100000000", "--allocations", "265000"),
    "bench_report.py": ("--jobs", "100000"),
    "bench_pages.py": ("--users", "1000"),
    "bench_ingest_gpu.py": (),
    "bench_db.py": (),
    "bench_serving.py": (),
    "bench_zombies.py": ("--jobs", "100000"),
    "bench_whatif.py": ("--jobs", "1000000"),
    "bench_agent.py": (),
    "bench_agents.py": (),
    "bench_storage.py": (),
    "bench_stop.py": (),
    "bench_checkpoint.py": (),
    "bench_restore.py": ("--gib", "10", "--rounds", "4"),
    "bench_tiers.py": (),
    "eviction.py": (),
}
QUICK = {
    "bench_sacct.py": ("--records", "5000", "--repeat", "1"),
    "bench_triage.py": ("--mib", "8"),
    "bench_join.py": ("--samples", "100000", "--allocations", "1000", "--peers", "", "--repeat", "1"),
    "bench_scale.py": ("--samples", "100000", "--allocations", "1000", "--workers", "1", "--peers", ""),
    "bench_report.py": ("--jobs", "2000", "--days", "1"),
    "bench_pages.py": ("--users", "20", "--jobs", "2000", "--days", "1"),
    "bench_ingest_gpu.py": ("2", "--files", "20", "--repeat", "1"),
    "bench_db.py": ("--runs", "2000", "--days", "20", "--only", "load,queries,ingest,retention,migrations"),
    "bench_serving.py": ("--engines", "5"),
    "bench_zombies.py": ("--jobs", "800"),
    "bench_whatif.py": ("--jobs", "3000"),
    "bench_agent.py": ("--seconds", "2", "--period", "1s", "--rounds", "1"),
    "bench_agents.py": ("--nodes", "10", "--jobs", "100"),
    "bench_storage.py": ("--samples", "100000", "--stores", "ours"),
}

WITH_CRIU = ("bench_checkpoint.py", "bench_restore.py")


def run(program: str, arguments: tuple[str, ...], *, quick: bool, accept: bool) -> list[str]:
    """Run a benchmark; return its failures."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ratios.json"
        environment = {**os.environ, ratios.VARIABLE: str(path)}
        command = [sys.executable, HERE / program, *arguments]
        status = subprocess.run(command, check=False, env=environment).returncode
        measured = ratios.reported(path)
    if status not in (0, ratios.MISSED):
        return [f"{program} failed (exit status {status})"]
    if quick:
        return []
    name = program.removesuffix(".py").removeprefix("bench_")
    problems = [f"{program}: {line}" for line in ratios.worse(ratios.kept(name), measured)]
    if measured and (accept or not problems):
        ratios.keep(name, arguments, measured)
    return [*problems, *([f"{program} missed a target"] if status else [])]


def main() -> int:
    """Run the benchmarks; the exit status is 1 if one failed, missed its target or has become worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="such as bench_join.py (default: all)")
    parser.add_argument("--quick", action="store_true", help="use little data, measure nothing")
    parser.add_argument("--accept", action="store_true", help="keep ratios that have become worse")
    parser.add_argument("--cluster", metavar="NAME", help="container cluster for programs that need CRIU")
    options = parser.parse_args()
    every = QUICK if options.quick else FULL
    if unknown := [name for name in options.programs if name not in every]:
        parser.error(f"no such program: {', '.join(unknown)}; there are {', '.join(every)}")
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    failures = []
    for program, arguments in every.items():
        if options.programs and program not in options.programs:
            continue
        where = ("--cluster", options.cluster) if options.cluster and program in WITH_CRIU else ()
        command_line = (*arguments, *where)
        print(f"\n== {program} {' '.join(command_line)}", flush=True)
        failures += run(program, command_line, quick=options.quick, accept=options.accept)
    print("".join(f"\n{failure}" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
