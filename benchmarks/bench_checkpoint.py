"""Dump and restore of a real process tree: time added to bare `criu`, and speed of a dump relative to the disk.

    python benchmarks/bench_checkpoint.py                    on a node, as root, with criu 4.1 or newer
    python benchmarks/bench_checkpoint.py --cluster NAME     the same in a compute container of that cluster

Peers, in the same run, with the same tree and file system: `criu dump` and `criu restore` with the same options, and
sequential writing (with sync) and reading of as many bytes, through the page cache as CRIU does, and with direct I/O.
They take turns. Times are medians over `--rounds`; ratios and differences are computed within each round, whose
measurements are at most a minute apart, and their medians are compared. Targets: less than 300 ms added to the dump and
to the restore of a small tree (64 MiB), and 80 % of the disk's speed for a large one (4 GiB). Verified restores, and
verification alone, are measured with the image in the page cache, as after a dump on the same node, and only on the
disk, as on another node; the latter is compared with reading the image.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import truediv
from pathlib import Path

from ratios import MISSED, report
from trees import (
    MIB,
    ORDERS,
    Figures,
    Place,
    bare_restore,
    forget,
    members,
    namespace,
    options,
    our_dump,
    our_restore,
    place_in,
    run,
    seconds,
    tree_of,
)

from slurm_affinode.checkpoint.interface import Image, Tree

ADDED_MS = 300.0
DISK_SHARE = 0.8
NAMES = {
    "bare_dump": "criu dump, synced to disk",
    "our_dump": "our dump: hashed, signed, synced to disk",
    "write": "sequential write of as many bytes",
    "write_direct": "the same with direct I/O",
    "bare_restore": "criu restore",
    "our_restore": "our restore, verified, image in the cache",
    "restore_cold": "the same, image on the disk",
    "verify": "verification alone, image in the cache",
    "verify_cold": "the same, image on the disk",
    "read_cold": "reading it from the disk",
    "read_direct": "the same with direct I/O",
}


def sync(directory: Path) -> None:
    """Sync the files of a directory to disk, as our dump does."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def bare_dump(tree: Tree, directory: Path) -> float:
    """Run `criu dump` with the same options; return its seconds."""
    directory.mkdir()
    began = time.monotonic()
    subprocess.run(
        ["nsenter", f"--target={tree.init.pid}", "--pid", "--mount", "--", "criu", "dump", f"--tree={tree.root_pid_ns}",
         f"--images-dir={directory}", "--log-file=dump.log", "--leave-running", "--manage-cgroups=ignore",
         "--shell-job", "--tcp-close", "--ext-unix-sk", "--timeout=600"],
        check=True, capture_output=True,
    )  # fmt: skip
    sync(directory)
    return time.monotonic() - began


def write_alone(path: Path, size: int) -> float:
    """Write this many bytes in order, and sync them to disk."""
    block = os.urandom(4 * MIB)
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    took = time.monotonic() - began
    path.unlink()
    return took


def write_direct(path: Path, size: int) -> float:
    """Write them with direct I/O, at the speed of the disk."""
    block = mmap.mmap(-1, 4 * MIB)
    block.write(os.urandom(len(block)))
    began = time.monotonic()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    for _ in range(max(1, size // len(block))):
        os.write(fd, block)
    os.fsync(fd)
    os.close(fd)
    took = time.monotonic() - began
    path.unlink()
    return took


def read_alone(directory: Path) -> float:
    """Read all files of a directory in order."""
    began = time.monotonic()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(4 * MIB):
                    pass
    return time.monotonic() - began


def read_direct(directory: Path) -> float:
    """Read them with direct I/O."""
    block = mmap.mmap(-1, 8 * MIB)
    began = time.monotonic()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            at = 0
            while got := os.preadv(fd, [block], at):
                at += got
                if at % mmap.PAGESIZE:  # the end of the file
                    break
            os.close(fd)
    return time.monotonic() - began


def measure(work: Path, mib: int, rounds: int) -> Figures:
    """Measure one size of tree."""
    durations: dict[str, list[float]] = {name: [] for name in NAMES}
    size = 0
    with place_in(work) as place:
        for number in range(rounds):
            order = ORDERS[number % len(ORDERS)]
            image = measure_dumps(place, mib, order, durations)
            size = image.manifest.size
            measure_restores(place, image, order, durations)
            place.store.remove(image)
            shutil.rmtree(work / "bare")
    return Figures(size, durations)


def measure_dumps(place: Place, mib: int, order: Sequence[int], durations: Mapping[str, list[float]]) -> Image:
    """Measure a round of dumps and writes. Return our image; that of bare criu is in ``bare``."""
    alone, images = place.work / "alone", list[Image]()
    with namespace(place.work, mib) as init:
        tree = tree_of(init)
        turns: tuple[tuple[str, Callable[[], float]], ...] = (
            ("bare_dump", partial(bare_dump, tree, place.work / "bare")),
            ("our_dump", partial(seconds, lambda: images.append(our_dump(place, tree, mib)))),
            ("write", partial(write_alone, alone, mib * MIB)),
            ("write_direct", partial(write_direct, alone, mib * MIB)),
        )
        for name, call in (turns[position] for position in order):
            os.sync()
            durations[name].append(call())
            if name == "our_dump":
                for pid in members(init).values():
                    os.kill(pid, signal.SIGCONT)
    return images[0]


def measure_restores(place: Place, image: Image, order: Sequence[int], durations: Mapping[str, list[float]]) -> None:
    """Measure a round of restores and reads: first from the page cache, then from the disk."""
    images = place.work / "images"
    verify = partial(seconds, partial(place.store.verify, image))
    durations["bare_restore"].append(bare_restore(place.work, place.work / "bare"))
    durations["verify"].append(verify())
    durations["our_restore"].append(our_restore(place))
    colds: tuple[tuple[str, Callable[[], float]], ...] = (
        ("verify_cold", verify),
        ("restore_cold", partial(our_restore, place)),
        ("read_cold", partial(read_alone, images)),
        ("read_direct", partial(read_direct, images)),
    )
    for name, call in (colds[position] for position in order):
        forget(images)
        durations[name].append(call())


def show(mib: int, figures: Figures) -> None:
    """Print the results."""
    print(f"\ntree of {mib} MiB, image of {figures.size / MIB:.0f} MiB")
    for name, what in NAMES.items():
        took = figures.median(name)
        each = " ".join(f"{duration * 1000:.0f}" for duration in figures.seconds[name])
        print(f"  {what:44} {took * 1000:7.0f} ms  {figures.size / MIB / took:6.0f} MiB/s  ({each})")


def compare(small: Figures, large: Figures) -> int:
    """Print ratios and targets; return ``MISSED`` if a target is missed."""
    dump_ms = small.paired(lambda product, bare: (product - bare) * 1000, "our_dump", "bare_dump")
    restore_ms = small.paired(lambda product, bare: (product - bare) * 1000, "our_restore", "bare_restore")
    share = large.paired(truediv, "write", "our_dump")
    print(f"\nadded to the dump of the small tree     {dump_ms:6.0f} ms   target: less than {ADDED_MS:.0f}")
    print(f"added to its restore, with verification {restore_ms:6.0f} ms   target: less than {ADDED_MS:.0f}")
    print(f"large dump, share of the disk's speed   {share:6.2f}      target: at least {DISK_SHARE}")
    direct, bare = large.paired(truediv, "write_direct", "our_dump"), large.paired(truediv, "write_direct", "bare_dump")
    print(f"large dump, share of direct I/O's speed {direct:6.2f}      bare criu: {bare:.2f}")
    dump, restore = (large.paired(truediv, f"our_{what}", f"bare_{what}") for what in ("dump", "restore"))
    verify = large.paired(truediv, "verify_cold", "read_cold")
    print(f"large dump, ratio to bare criu             {dump:6.2f}")
    print(f"large restore, ratio to bare criu          {restore:6.2f}")
    print(f"verification, ratio to reading from disk   {verify:6.2f}")
    back, back_direct = (large.paired(truediv, peer, "restore_cold") for peer in ("read_cold", "read_direct"))
    print(f"large restore from the disk, verified, share of reading it: {back:.2f}, by direct I/O {back_direct:.2f}")
    report(
        dump_to_writing=1 / share, dump_to_criu=dump, restore_to_criu=restore, verification_to_reading=verify,
        restore_to_reading=1 / back,
    )  # fmt: skip
    return 0 if dump_ms < ADDED_MS and restore_ms < ADDED_MS and share >= DISK_SHARE else MISSED


def main() -> int:
    """Measure and compare; return ``MISSED`` if a target is missed."""
    parser = options(__doc__)
    parser.add_argument("--mib", type=int, default=4096, help="size of the large tree")
    parser.add_argument("--small-mib", type=int, default=64)
    arguments = parser.parse_args()

    def here(work: Path) -> int:
        small = measure(work, arguments.small_mib, arguments.rounds)
        show(arguments.small_mib, small)
        large = measure(work, arguments.mib, arguments.rounds)
        show(arguments.mib, large)
        return compare(small, large)

    return run(Path(__file__).name, arguments, here)


if __name__ == "__main__":
    sys.exit(main())
