"""The command behind ``make fuzz``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from fuzz import runner
from fuzz.targets import TARGETS

OUT = Path("out/fuzz")
_COLUMNS = "{:<22} {:>9} {:>9} {:>9} {:>9} {:>9}"


def main() -> int:
    """Run the targets and return the exit status: 1 if any of them failed."""
    options = _options()
    if options.list:
        for target in TARGETS.values():
            print(f"{target.name:<22} {target.about}")
        return 0
    targets = [
        item for item in TARGETS.values() if any(fnmatch(item.name, pattern) for pattern in options.targets or "*")
    ]
    if not targets:
        print(f"fuzz: no target matches {' '.join(options.targets)}; --list shows them", file=sys.stderr)
        return 2
    if options.replay:
        return _replay(options.replay, targets)
    print(_COLUMNS.format("target", "inputs", "inputs/s", "refused", "accepted", "failures"), flush=True)
    if min(options.jobs, len(targets)) > 1:
        return _run_side_by_side(targets, options)
    failed = False
    for target in targets:
        outcome = runner.run_apart(target, options.inputs, options.seed)
        failed |= bool(outcome.failures)
        if outcome.skipped is not None:
            print(f"{target.name:<22} skipped: {outcome.skipped}", flush=True)
            continue
        rate = round(outcome.inputs / max(outcome.took_s, 1e-9)) if outcome.took_s else 0
        row = (target.name, outcome.inputs, rate, outcome.refused, outcome.accepted, len(outcome.failures))
        print(_COLUMNS.format(*row), flush=True)
        for failure in outcome.failures:
            _report(target, failure)
    return int(failed)


def _run_side_by_side(targets: list[runner.Target], options: argparse.Namespace) -> int:
    """Run each target with a command of its own, some at a time, and print the results in the order of the targets."""

    def run(target: runner.Target) -> subprocess.CompletedProcess[str]:
        numbers = ("--inputs", str(options.inputs), "--seed", str(options.seed), "--jobs", "1")
        argv = (sys.executable, "-m", "fuzz", target.name, *numbers)
        return subprocess.run(argv, check=False, capture_output=True, text=True)

    failed = False
    with ThreadPoolExecutor(options.jobs) as pool:
        for ran in pool.map(run, targets):
            failed |= ran.returncode != 0
            print("".join(ran.stdout.splitlines(keepends=True)[1:]), end="", flush=True)
            if ran.returncode != 0:
                print(ran.stderr, end="", file=sys.stderr)
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names or patterns of targets (default: all)")
    parser.add_argument("--inputs", type=int, default=1_000_000, metavar="N", help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same inputs")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="targets at a time (default: CPUs)"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the input in FILE on the named target")
    parser.add_argument("--list", action="store_true", help="list the targets")
    return parser.parse_args()


def _report(target: runner.Target, failure: runner.Failure) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{target.name}.{failure.index}"
    path.write_bytes(failure.data)
    text = failure.what.rstrip().replace("\n", "\n    ")
    print(f"  input {failure.index}: {text}\n  again: make fuzz ARGS='{target.name} --replay {path}'", flush=True)


def _replay(path: Path, targets: list[runner.Target]) -> int:
    if len(targets) != 1:
        print("fuzz: --replay needs the name of one target", file=sys.stderr)
        return 2
    outcome = runner.replay(targets[0], path.read_bytes())
    for failure in outcome.failures:
        print(failure.what)
    print("failed" if outcome.failures else "accepted" if outcome.accepted else "refused")
    return int(bool(outcome.failures))


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)  # threads of a replayed target may still run
