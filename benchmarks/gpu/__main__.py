"""GB/s of a suspension and a restore by phase: ``python -m benchmarks.gpu`` (``make bench-gpu``).

For 1, 10, 40 and, if they fit, 70 GiB of GPU memory: lock, checkpoint, restore and unlock with our code and with only
the driver's calls, in turns on one process; a pinned copy over the link in the same run, and other kinds of host
memory; the driver's staging with and without transparent huge pages; several processes; a complete suspension with CRIU
and an image on disk. Published figures are shown for comparison.

The results file is written after each measurement. If commands are limited to ten minutes, use --quick, which leaves
out 70 GiB and makes fewer rounds, and then --resume, which measures what is missing for this machine and driver.

Goals, as ratios within the run: our code adds less than 5 % to the driver's own time, a wake from host memory takes at
most 1.2 times the driver's restore, and the default kind of host memory is the fastest.

Exit status: 0: all goals are met, or nothing could be measured (status "skipped" in the JSON, with the reason: no GPU,
or a driver without the feature); 1: a goal is missed, or a measurement failed (the others are made nevertheless). On
the emulated driver (EMULATED=1) sizes are small, results are marked "emulated", and goals are not evaluated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

# ruff: noqa: E402 - imports from the paths above
from gpu.machine import MIB, Machine, Missing, find
from gpu.programs import Programs, programs, unusable

from benchmarks.gpu import measure, report
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.gpu.nvml import NvmlDriver

HARDWARE = REPOSITORY / "benchmarks" / "results" / "gpu.json"
EMULATED = REPOSITORY / "out" / "gpu" / "bench-emulated.json"
GIB_SIZES, QUICK_GIB, EMULATED_MIB = (1, 10, 40, 70), (1, 10, 40), (16, 48)
QUICK_ROUNDS = 2
LARGE_ROUNDS = 3
"""Of large sizes, at least: their calls take seconds, and two rounds of 40 GiB have differed by a seventh."""
MIDDLE_MIB, LINK_MIB = 10 * 1024, 4096
"""Sizes of measurements with one size: several processes and others, and copies over the link."""
PARTS = ("staging", "host_memory", "huge_pages", "custom_storage", "parallel", "images")
HERE = Path(__file__).resolve().parent
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - host memory as a file system
DEFAULTS = ("huge pages, pre-faulted, then pinned", "pre-faulted, huge pages")
"""The kinds that ``custom_storage`` uses, by preference."""


def main() -> int:
    """Measure, print and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=gibibytes, nargs="+", default=list(GIB_SIZES), metavar="N", help="sizes")
    parser.add_argument("--rounds", type=at_least_once, default=3, metavar="N",
                        help="rounds of each size (small sizes more, large sizes at least three)")  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="1, 10 and 40 GiB, fewer rounds: for a limit of ten minutes"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="directory of images, on disk"
    )
    parser.add_argument("--image-gib", type=gibibytes, nargs="*", default=[1, 10], metavar="N", help="sizes of images")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--resume", action="store_true", help="keep the results of this machine that the file has")
    parser.add_argument("--out", type=Path, help="JSON file [benchmarks/results/gpu.json; emulated: out/gpu/...]")
    options = parser.parse_args()
    if options.quick:
        options.gib, options.rounds = list(QUICK_GIB), QUICK_ROUNDS
    machine = find()
    if isinstance(machine, Missing):
        return skipped(machine, options.out)
    path: Path = options.out or (EMULATED if machine.emulated else HARDWARE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(path.name + ".new")
        probe.touch()
        probe.unlink()
    except OSError as error:  # report it before the first measurement
        parser.error(f"{path} cannot be written ({error.strerror}): --out names another file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that programs on the GPU are ended
    with (
        closing(NvmlDriver()) as nvml,
        closing(Cuda(driver_version=nvml.version)) as cuda,
        tempfile.TemporaryDirectory(prefix="bench-gpu-") as top,
    ):
        if (missing := unusable(cuda, Path(top))) is not None:
            return skipped(missing, options.out)
        with programs(cuda, Path(top)) as run:
            results = everything(Bench(machine, nvml, cuda, run), options, path)
    report.show(results)
    print(f"\nwritten: {path}")
    return 1 if results["failed"] or any(goal["met"] is False for goal in results["goals"]) else 0


def gibibytes(text: str) -> float:
    """Parse a size of GPU memory. Raises ``ValueError``."""
    value = float(text)
    if not 1 / 64 <= value <= 1 << 20:
        raise ValueError(text)
    return value


def at_least_once(text: str) -> int:
    """Parse a positive integer. Raises ``ValueError``."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine, the drivers and the programs of the measurements."""

    machine: Machine
    nvml: NvmlDriver
    cuda: Cuda
    run: Programs


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement."""

    part: str
    text: str
    """Description for the log."""
    take: Callable[[], Any]
    """Returns the results: the whole part, or one entry of it."""
    size: int | None = None
    """Bytes, if the part has an entry for each size."""

    def done(self, results: dict[str, Any]) -> bool:
        """Return whether the results have it."""
        if self.size is None:
            return self.part in results
        return any(entry["bytes"] == self.size for entry in results.get(self.part, ()))

    def add(self, results: dict[str, Any]) -> None:
        """Measure, and add the result."""
        taken = self.take()
        if self.size is None:
            results[self.part] = taken
        else:
            entries = [entry for entry in results.get(self.part, ()) if entry["bytes"] != self.size]
            results[self.part] = sorted([*entries, taken], key=lambda entry: int(entry["bytes"]))


def everything(bench: Bench, options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Make all measurements; write the file after each."""
    machine = bench.machine
    results: dict[str, Any] = {
        "status": "emulated" if machine.emulated else "measured",
        "complete": False,
        "command": report.COMMAND,
        "machine": json.loads(json.dumps(machine.facts())),
    }
    if options.resume:
        results = {**_earlier(path, results["machine"]), **results}
    sizes, all_sizes = ([int(gib * 1024) for gib in some] for some in (options.gib, {*GIB_SIZES, *options.gib}))
    if machine.emulated:
        sizes = all_sizes = list(EMULATED_MIB)
    fit, results["left_out"] = measure.sizes(machine, bench.nvml, sorted(all_sizes))
    results["failed"] = []
    steps = list(_steps(bench, options, fit))
    for step in steps:
        selected = step.part in options.only and (step.part != "staging" or step.size in {mib * MIB for mib in sizes})
        if not selected or (options.resume and step.done(results)):
            continue
        say(step.text)
        try:
            step.add(results)
        except Exception as error:  # continue with the others after any error
            results["failed"].append(f"{step.text}: {type(error).__name__}: {' '.join(str(error).split())}")
            say(f"FAILED: {results['failed'][-1]}")
        finally:
            bench.run.close()
        _save(path, results)
    results["complete"] = not results["failed"] and all(step.done(results) for step in steps)
    _save(path, results)
    return results


def _save(path: Path, results: dict[str, Any]) -> None:
    results["when"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if "host_memory" in results:
        results["host_memory_default"] = default_of(results["host_memory"])
    results["goals"] = report.goals(results)
    report.write(path, results)


def _earlier(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the results in the file for this machine and driver."""
    try:
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        previous = before["machine"]
        if (previous["driver"], previous["gpus"]) == (machine["driver"], machine["gpus"]):
            return {part: before[part] for part in PARTS if part in before}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}


def _steps(bench: Bench, options: argparse.Namespace, fit: list[int]) -> Iterator[Step]:
    """Yield the measurements; the longest come last."""
    machine, run = bench.machine, bench.run
    product, bare = measure.Product(bench.cuda, bench.nvml), measure.Bare()
    largest = EMULATED_MIB[-1] if machine.emulated else machine.mib
    middle, link = min(MIDDLE_MIB, largest), min(LINK_MIB, largest)
    rounds = options.rounds

    def staging(mib: int) -> Step:
        often = rounds * 3 if mib <= 1024 else rounds if mib <= MIDDLE_MIB else max(rounds, LARGE_ROUNDS)
        return Step("staging", f"staging of {mib / 1024:g} GiB",
                    lambda: measure.staging(run, product, bare, mib, often), mib * MIB)  # fmt: skip

    def image(mib: int) -> Step:
        return Step("images", f"image of {mib / 1024:g} GiB",
                    lambda: measure.imaged(run, product, machine, mib, options.directory), mib * MIB)  # fmt: skip

    def stored() -> list[dict[str, Any] | str]:
        places = (SHARED_MEMORY, options.directory)
        return [measure.stored(run, product, middle, place, rounds) for place in places]

    yield from (staging(mib) for mib in fit if mib <= MIDDLE_MIB)
    yield Step("host_memory", "copies over the link, host memory of several kinds", lambda: copies(run, link))
    yield Step("huge_pages", "transparent huge pages", lambda: measure.pages(run, bare, middle, rounds))
    yield Step("custom_storage", "custom storage", stored)
    yield Step("parallel", "several processes", lambda: measure.parallel(run, bench.nvml, middle))
    yield from map(image, [EMULATED_MIB[-1]] if machine.emulated else [int(gib * 1024) for gib in options.image_gib])
    yield from (staging(mib) for mib in fit if mib > MIDDLE_MIB)


def copies(run: Programs, mib: int) -> list[dict[str, Any]]:
    """Measure copies, in a process of its own, which has the context."""
    program = run.start(str(HERE / "copying.py"))
    try:
        kinds: list[dict[str, Any]] = program.ask("measure", mib=mib)
    finally:
        run.close()
    return kinds


def default_of(kinds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fastest kind, and the default one with its ratio to the fastest."""
    # The ring of custom_storage is allocated once, so its allocation is not counted.
    usable = {kind["kind"]: kind["out_s"] + kind["in_s"] for kind in kinds if "why_not" not in kind}
    default = next((kind for kind in DEFAULTS if kind in usable), None)
    if default is None:
        return None
    fastest = min(usable, key=lambda kind: usable[kind])
    return {"fastest": fastest, "default": default, "times_fastest": usable[default] / usable[fastest]}


def skipped(missing: Missing, out: Path | None) -> int:
    """Report that nothing was measured; return 1 if there is a driver that does not work."""
    why = missing.why.partition("; on a machine")[0]
    print(f"{report.NOT_MEASURED}: {why}")
    print(f"on a machine with an NVIDIA driver: {report.COMMAND}   (without a network: make gpu-bundle, ./run bench)")
    if out is not None:
        results = {"status": "skipped", "result": report.NOT_MEASURED, "why": why, "command": report.COMMAND}
        report.write(out, results)
    return 1 if missing.broken else 0


def say(what: str) -> None:
    """Print a line of progress to standard error."""
    print(f"measuring: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
