"""Run all benchmarks: ``python -m benchmarks [--quick]``. Ratios come from one run on this machine.

``--quick`` uses a tenth of the data: it shows that the benchmarks work, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FULL = {
    "bench_sacct.py": ("--records", "1000000"),
    "bench_triage.py": ("--mib", "1024"),
    "bench_join.py": ("--samples", "100000000", "--allocations", "265000"),
    "bench_report.py": ("--jobs", "100000"),
    "bench_ingest_gpu.py": (),
    "bench_serving.py": (),
    "bench_zombies.py": ("--jobs", "100000"),
    "bench_agent.py": (),
    "bench_stop.py": (),
    "bench_checkpoint.py": (),
    "bench_restore.py": ("--gib", "10", "--rounds", "4"),
    "bench_tiers.py": (),
    "eviction.py": (),
}
QUICK = {
    "bench_sacct.py": ("--records", "100000"),
    "bench_triage.py": ("--mib", "128"),
    "bench_join.py": ("--samples", "10000000", "--allocations", "26500"),
    "bench_report.py": ("--jobs", "10000"),
    "bench_serving.py": ("--engines", "100"),
    "bench_zombies.py": ("--jobs", "10000"),
    "bench_agent.py": ("--seconds", "20"),
}


def main() -> int:
    """Run the benchmarks; the exit status is 1 if one failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    chosen = QUICK if parser.parse_args().quick else FULL
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    failed = []
    for name, arguments in chosen.items():
        print(f"\n== {name} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, HERE / name, *arguments], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed or missed a target: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
