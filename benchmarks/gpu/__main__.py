"""GB/s of a suspension and its return, by phase: ``python -m benchmarks.gpu`` (``make bench-gpu``).

For 1, 10, 40 and, where they fit, 70 GiB of GPU memory: lock, checkpoint, restore and unlock with our code and with
the driver's calls alone, in turns on the same process; a pinned copy over the link in the same run, and host memory of
other kinds; the driver's staging with and without transparent huge pages; several processes; the whole way through CRIU
and an image on disk. Published figures stand beside.

Goals, each a ratio within the run: our code adds less than 5 % to the driver's own time, a process is awake from host
memory within 1.2 times the driver's restore, and the host memory that is used by default is the fastest there is.

Exit status: 0 all met, or nothing could be measured (status "skipped" in the JSON, with the reason: no GPU, or a driver
that cannot); 1 a goal is missed. On the emulated driver (EMULATED=1) sizes are small, results are marked "emulated",
and goals are not judged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

# ruff: noqa: E402 - what follows lies beside this folder
from gpu.machine import Machine, find
from gpu.programs import Programs, programs

from benchmarks.gpu import measure, report
from slurm_affinode.checkpoint.cuda import Cuda
from slurm_affinode.gpu.nvml import NvmlDriver

HARDWARE = REPOSITORY / "benchmarks" / "results" / "gpu.json"
EMULATED = REPOSITORY / "out" / "gpu" / "bench-emulated.json"
GIB_SIZES, EMULATED_MIB = (1, 10, 40, 70), (16, 48)
HERE = Path(__file__).resolve().parent
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - host memory as a file system
DEFAULTS = ("huge pages, pre-faulted, then pinned", "pre-faulted, huge pages")
"""What ``cuda_storage`` uses: the first that can be had."""


def main() -> int:
    """Measure, tell, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=list(GIB_SIZES), metavar="N", help="sizes")
    parser.add_argument("--rounds", type=int, default=3, help="of each size (the larger ones have two)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="for images, on the disk")
    parser.add_argument("--image-gib", type=float, nargs="*", default=[1, 10], metavar="N", help="sizes of images")
    parser.add_argument("--out", type=Path, help="JSON file [benchmarks/results/gpu.json; emulated: out/gpu/...]")
    options = parser.parse_args()
    machine = find()
    if isinstance(machine, str):
        return skipped(machine, options.out)
    with closing(NvmlDriver()) as nvml, closing(Cuda(driver_version=nvml.version)) as cuda:
        can = cuda.capabilities()
        if not can.checkpoint:
            return skipped(f"the driver cannot checkpoint: {can.why_not}", options.out)
        with tempfile.TemporaryDirectory(prefix="bench-gpu-") as top, programs(cuda, Path(top)) as run:
            found = everything(machine, nvml, cuda, run, options)
    found["goals"] = report.goals(found)
    report.show(found)
    path = options.out or (EMULATED if machine.emulated else HARDWARE)
    report.write(path, found)
    print(f"\nwritten: {path}")
    return 1 if any(one["met"] is False for one in found["goals"]) else 0


def everything(
    machine: Machine, nvml: NvmlDriver, cuda: Cuda, run: Programs, options: argparse.Namespace
) -> dict[str, Any]:
    """All measurements."""
    wanted = list(EMULATED_MIB) if machine.emulated else [int(gib * 1024) for gib in options.gib]
    fit, left_out = measure.sizes(machine, nvml, wanted)
    ours, bare = measure.Ours(cuda, nvml), measure.Bare()
    middle = next((mib for mib in reversed(fit) if mib <= 10 * 1024), fit[0] if fit else 16)
    found: dict[str, Any] = {
        "status": "emulated" if machine.emulated else "measured",
        "command": report.COMMAND,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.facts(),
        "left_out": left_out,
        "staging": [],
    }
    for mib in fit:
        say(f"staging of {mib / 1024:g} GiB")
        rounds = min(options.rounds, 2) if mib > 10 * 1024 else options.rounds
        found["staging"].append(measure.staging(run, ours, bare, mib, rounds))
    say("copies over the link, host memory of several kinds")
    found["host_memory"] = copies(run, min(middle, 4096))
    found["host_memory_default"] = default_of(found["host_memory"])
    say("transparent huge pages")
    found["huge_pages"] = measure.pages(run, bare, middle, options.rounds)
    say("custom storage")
    found["custom_storage"] = [
        measure.stored(run, ours, middle, place, options.rounds) for place in (SHARED_MEMORY, options.directory)
    ]
    say("several processes")
    found["parallel"] = measure.parallel(run, nvml, middle)
    images = [EMULATED_MIB[-1]] if machine.emulated else [int(gib * 1024) for gib in options.image_gib]
    found["images"] = []
    for mib in images:
        say(f"image of {mib / 1024:g} GiB")
        found["images"].append(measure.imaged(run, ours, machine, mib, options.directory))
    return found


def copies(run: Programs, mib: int) -> list[dict[str, Any]]:
    """In a process of its own, which has the context."""
    program = run.start(str(HERE / "copying.py"))
    try:
        kinds: list[dict[str, Any]] = program.ask("measure", mib=mib)
    finally:
        run.close()
        run.started.clear()
    return kinds


def default_of(kinds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Which kind is the fastest, and how the one that is used for our own copies stands to it."""
    # The ring of cuda_storage is made once for the life of the helper, so its making is not counted.
    usable = {one["kind"]: one["out_s"] + one["in_s"] for one in kinds if "why_not" not in one}
    default = next((kind for kind in DEFAULTS if kind in usable), None)
    if default is None:
        return None
    fastest = min(usable, key=lambda kind: usable[kind])
    return {"fastest": fastest, "default": default, "times_fastest": usable[default] / usable[fastest]}


def skipped(why: str, out: Path | None) -> int:
    """Nothing was measured: say so, and how it is."""
    why = why.partition("; on a machine")[0]
    print(f"{report.NOT_MEASURED}: {why}")
    print(f"on a machine with an NVIDIA driver: {report.COMMAND}   (without a network: make gpu-bundle, ./run bench)")
    if out is not None:
        found = {"status": "skipped", "result": report.NOT_MEASURED, "why": why, "command": report.COMMAND}
        report.write(out, found)
    return 0


def say(what: str) -> None:
    """What is being done, on standard error."""
    print(f"measuring: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
