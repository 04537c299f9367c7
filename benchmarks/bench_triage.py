"""MB per second of the triage of logs, compared with GNU grep for the same texts.

    python benchmarks/bench_triage.py --mib 1024 --json

The log is generated with a fixed seed: access and statistics lines of a model server, progress bars, some tracebacks,
and text that is not UTF-8. ``grep -c -F`` searches it for every text that begins an examination, and examines nothing.
CPU time of both, and the peak memory of the triage. The limit is 200 MB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from ratios import MISSED, peak_gib, report

from slurm_affinode.engines.crashes.crash_log import TRIGGERS
from slurm_affinode.pipeline.triage import examine

LIMIT_MB_S = 200
BLOCK = 1 << 20
EXCEPTION = (
    "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1] Traceback (most recent call last):\n"
    '(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1]   File "/srv/v/a.py", line 3, in step\n'
    "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1] KeyError: {number}\n"
)


def block(draw: random.Random) -> bytes:
    """Return some 1 MiB of a log."""
    lines: list[str] = []
    length = 0
    while length < BLOCK:
        kind, number = draw.random(), draw.randrange(10**6)
        if kind < 0.5:
            line = f'INFO:     10.0.0.{number % 250}:{number % 60000} - "POST /v1/completions HTTP/1.1" 200 OK\n'
        elif kind < 0.95:
            line = (
                f"(APIServer pid=7) INFO 01-01 00:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: "
                f"{number / 7:.1f} tokens/s, Avg generation throughput: {number / 9:.1f} tokens/s, "
                f"Running: {number % 97} reqs\n"
            )
        elif kind < 0.999:
            line = f"\r{number % 100}%|{'#' * (number % 40)}| {number}/1000000\n"
        else:
            line = EXCEPTION.format(number=number)
        lines.append(line)
        length += len(line)
    return "".join(lines).encode() + b"caf\xe9\n"


def main() -> int:
    """Generate a log, measure both, print the result; exit with 1 below the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the log in MiB")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    draw = random.Random(1)  # noqa: S311 - made-up data, not secrets
    parts = [block(draw) for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        log, texts = Path(folder) / "server.log", Path(folder) / "texts"
        with log.open("wb") as file:
            for index in range(arguments.mib):
                file.write(parts[index % len(parts)])
        texts.write_text("".join(f"{text}\n" for text in TRIGGERS))
        megabytes = log.stat().st_size / 1e6
        before = _children_s()
        # With /dev/null as its output grep would stop at the first line.
        subprocess.run(["grep", "-a", "-c", "-F", "-f", texts, log], check=True, stdout=subprocess.PIPE,
                       env={**os.environ, "LC_ALL": "C"})  # fmt: skip
        grep_s = _children_s() - before
        started = time.process_time()
        examination = examine([str(log)], run=_no_command)
        triage_s = time.process_time() - started
    peak_mib = peak_gib() * 1024
    result = {
        "megabytes": round(megabytes), "failures_kept": len(examination.result.failures),
        "triage_mb_per_s": round(megabytes / triage_s), "grep_mb_per_s": round(megabytes / grep_s),
        "grep_over_triage": round(triage_s / grep_s, 2), "peak_mib": round(peak_mib),
        "limit_mb_per_s": LIMIT_MB_S, "met": megabytes / triage_s >= LIMIT_MB_S,
    }  # fmt: skip
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(f"{k:18} {v}" for k, v in result.items()))
    report(to_grep=triage_s / grep_s)
    return 0 if result["met"] else MISSED


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _no_command(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a log alone needs no command")


if __name__ == "__main__":
    sys.exit(main())
