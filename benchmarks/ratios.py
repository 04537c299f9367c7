"""Ratios that benchmarks measure, each against a peer in the same run; more is worse. Seconds are not kept.

A benchmark passes its ratios to ``report`` and ends with 0, with ``MISSED``, or with another status after an error.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

MISSED = 4
"""Exit status if a target is missed, which also happens on a slow or busy machine."""
VARIABLE = "BENCHMARK_RATIOS"
"""Environment variable that names the file for the ratios."""
WORSE = 1.3
"""A ratio that exceeds the kept one by this factor is a failure."""
KEPT = Path(__file__).resolve().parent / "results"
PEERS = Path(__file__).resolve().parent / "ratios.toml"
"""What each ratio compares with."""


def peak_gib() -> float:
    """Return the peak memory of this process. That of ``getrusage`` includes its parent's at the start (exec(2))."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition("VmHWM:")[2].split()[0]) / 2**20


def report(**ratios: float) -> None:
    """Add ratios to the file of ``python -m benchmarks``, if it runs this program."""
    if path := os.environ.get(VARIABLE):
        every = reported(Path(path)) | {name: round(ratio, 3) for name, ratio in ratios.items()}
        Path(path).write_text(json.dumps(every), encoding="utf-8")


def reported(path: Path) -> dict[str, float]:
    """Return the ratios in the file that ``report`` has written, if any."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def kept(name: str) -> dict[str, float]:
    """Return the ratios of the last accepted run of a benchmark."""
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["ratios"] if path.exists() else {}


def keep(name: str, arguments: tuple[str, ...], ratios: Mapping[str, float]) -> None:
    """Keep the ratios of a run, with the machine and the commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    content = {"arguments": arguments, "commit": commit.stdout.strip(), "machine": machine, "ratios": dict(ratios)}
    (KEPT / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def worse(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Return a line for each ratio that has become worse, or that is no longer measured."""
    worse_ratios = [
        f"{name}: {now[name]:g} instead of {was:g}" for name, was in before.items() if now.get(name, 0) > WORSE * was
    ]
    return [*worse_ratios, *(f"{name}: not measured" for name in before if name not in now)]


def table() -> str:
    """Return the kept ratios of all benchmarks as a table in Markdown."""
    rows = ["| benchmark | peer | ratio | commit |", "| --- | --- | --- | --- |"]
    for name, peers in tomllib.loads(PEERS.read_text(encoding="utf-8")).items():
        path = KEPT / f"{name}.json"
        run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if run is None:
            rows.append(f"| {peers['title']} | | not measured | |")
            continue
        rows += [
            f"| {peers['title']} | {peers.get(key, key.replace('_', ' '))} | {ratio:.3g} | {run['commit']} |"
            for key, ratio in run["ratios"].items()
        ]
    return "\n".join(rows)
