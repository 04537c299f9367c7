"""Speed of images relative to that of their storage tiers: dump, copies between tiers, verified reading.

    python benchmarks/bench_tiers.py [--gib 1] [--rounds 8] [--disk DIR] [--memory DIR] [--shared DIR]
    python benchmarks/bench_tiers.py --image 10        only an image of 10 GiB from the disk

Peer, in the same run, on the same file systems, taking turns: `dd` with blocks of 8 MiB and direct I/O (through the
page cache if the file system does not support it), synced to disk at the end. Ratios are computed within each round,
whose measurements are at most a minute apart, and their median counts; the order changes from round to round. Before
each read the files are dropped from the page cache. Goals: 80 % of the tier's own sequential speed for a dump (written
by another process like CRIU, hashed, signed, synced to disk) and for reading in a restore (cold, every digest
verified), and an image of 10 GiB from the disk within 1.3 times of `dd`: verified in place, compared with `dd` that
reads it; copied to memory, compared with `dd` that copies it there.

The data is 256 MiB of random bytes in memory, repeated: no disk is as fast, and an image may be larger than half of the
memory. `--shared` also measures a directory on the shared file system.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from ratios import MISSED, report
from trees import ORDERS

from slurm_affinode.checkpoint.interface import Image
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.retention import Copy, Tier
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest, SuspendOption, Versions

SHARE = 0.8
WITHIN = 1.3
PIECE = 256 << 20
DD_BLOCK = 8 << 20
KEY = JobKey("bench", 1, 1)
RUN = LiveRun(JobKey("bench", 1, 2), 0, 1)
FACTS = Manifest(
    key=KEY, seq=0, uid=0, gid=0, node="node", restarts=0, started_epoch=0.0, dumped_epoch=0.0, option=SuspendOption(),
    versions=Versions("", "", ""), root_pid=0, cuda_pids=(), gpus=(), gpu_bytes=0, outputs=(), files=(),
)  # fmt: skip
Seconds = dict[str, list[float]]
"""Measurement -> one value for each round."""


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def dd(*words: str) -> None:
    """Run dd with large blocks."""
    subprocess.run(["dd", f"bs={DD_BLOCK}", "status=none", *words], check=True)


def dd_write(source: Path, target: Path, size: int, word: Sequence[str]) -> None:
    """Copy the source repeatedly, up to this many bytes, and sync it to disk."""
    for at in range(0, size, PIECE):
        dd(f"if={source}", f"of={target}", f"seek={at // DD_BLOCK}", "conv=notrunc", *word)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def direct(path: Path, word: str) -> list[str]:
    """Return ``iflag=direct`` if the file system supports it."""
    probe = path / "probe"
    done = subprocess.run(
        ["dd", "if=/dev/zero", f"of={probe}", f"bs={DD_BLOCK}", "count=1", "oflag=direct", "status=none"],
        capture_output=True, check=False,
    )  # fmt: skip
    probe.unlink(missing_ok=True)
    return [f"{word}=direct"] if done.returncode == 0 else []


def forget(path: Path) -> None:
    """Drop a file, or the files below a directory, from the page cache."""
    for target in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        fd = os.open(target, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def dump(store: DirectoryStore, source: Path, size: int) -> Image:
    """Write an image whose pages come from another process, like CRIU."""
    with store.begin(KEY, uid=0, estimate=size) as writer:
        writer.follow()
        subprocess.run(
            ["sh", "-c", 'for n in $(seq "$1"); do cat "$2"; done >"$3"', "sh", str(size // PIECE), str(source),
             f"/proc/self/fd/{writer.criu_fd}/pages-1.img"],
            check=True, pass_fds=(writer.criu_fd,),
        )  # fmt: skip
        return writer.commit(FACTS)


@contextmanager
def emptied(store: DirectoryStore) -> Iterator[None]:
    """Yield without images; remove them afterwards."""
    store.discard(KEY, 1)
    yield
    store.discard(KEY, 1)


def measure(tier: Tier, source: Path, size: int, seconds: Seconds, *, product_first: bool) -> None:
    """Measure a round for one tier: dd write and read, dump, verified reading."""
    place, name = tier.store.path, tier.name
    alone = place / "alone"

    def add(what: str, call: Callable[[], object]) -> None:
        os.sync()
        seconds.setdefault(f"{name}: {what}", []).append(timed(call))

    def by_dd() -> None:
        add("dd write", partial(dd_write, source, alone, size, direct(place, "oflag")))
        forget(alone)
        add("dd read", partial(dd, f"if={alone}", "of=/dev/null", *direct(place, "iflag")))
        alone.unlink()

    def by_us() -> None:
        with emptied(tier.store):
            add("dump", partial(dump, tier.store, source, size))
            image = tier.store.get(KEY.name, 1)
            forget(place)
            add("verified reading", partial(tier.store.verify, image))

    for measurement in (by_us, by_dd) if product_first else (by_dd, by_us):
        measurement()


def moves(tiers: Tiers, source: Path, size: int, seconds: Seconds) -> None:
    """Measure a round of copies from each tier to each other."""
    for origin in tiers.tiers:
        with emptied(origin.store):
            copy = Copy(dump(origin.store, source, size), origin)
            for to in tiers.tiers:
                if to is not origin:
                    with emptied(to.store):
                        forget(origin.store.path)
                        os.sync()
                        took = timed(partial(tiers.move, copy, to))
                        seconds.setdefault(f"copy {origin.name} to {to.name}", []).append(took)


class Table:
    """Printed ratios, and missed goals."""

    def __init__(self, size: int, seconds: Mapping[str, Sequence[float]]) -> None:
        self.size, self.seconds = size, seconds
        self.rows: list[dict[str, object]] = []
        self.missed: list[str] = []

    def rate(self, what: str) -> str:
        """Return MB/s from the median of seconds."""
        return f"{self.size / statistics.median(self.seconds[what]) / 1e6:7.0f} MB/s"

    def peer(self, what: str) -> None:
        """Return the values of the peer."""
        print(f"  {what:32} {self.rate(what)}")

    def row(self, what: str, peer: str, goal: float | None) -> None:
        """Print a ratio; ``goal``: share of the peer's speed."""
        shares = [peer_s / own_s for own_s, peer_s in zip(self.seconds[what], self.seconds[peer], strict=True)]
        share = statistics.median(shares)
        self.rows.append({"what": what, "peer": peer, "share": share, "rounds": shares, "goal": goal})
        met = "" if goal is None else f"goal {goal:.2f}  {'met' if share >= goal else 'MISSED'}"
        spread = f"({min(shares):.2f} to {max(shares):.2f})"
        print(f"  {what:32} {self.rate(what)}  {share:5.2f} of {peer:18} {spread:16} {met}")
        if goal is not None and share < goal:
            self.missed.append(what)


def all_tiers(places: Mapping[str, Path], size: int, rounds: int, memory: Path) -> Table:
    """Measure every tier, and copies between all pairs."""
    seconds: Seconds = {}
    with ExitStack() as stack:
        source, tiers = prepared(stack, places, memory)
        for number in range(rounds):
            for tier in tiers.tiers[:: 1 if number % 2 else -1]:
                measure(tier, source, size, seconds, product_first=number % 4 in (1, 2))
            moves(tiers, source, size, seconds)
    table = Table(size, seconds)
    print(f"image of {size / (1 << 30):.2f} GiB, medians of {rounds} rounds")
    for name in places:
        for what in ("dd write", "dd read"):
            table.peer(f"{name}: {what}")
    for name in places:
        goal = None if name == "memory" else SHARE
        table.row(f"{name}: dump", f"{name}: dd write", goal)
        table.row(f"{name}: verified reading", f"{name}: dd read", goal)
    for origin in places:
        for to in places:
            if to != origin:
                # The slower tier limits a copy.
                ends = (f"{origin}: dd read", f"{to}: dd write")
                slower = max(ends, key=lambda what: statistics.median(seconds[what]))
                goal = SHARE if to != "memory" else None
                if (origin, to) == ("disk", "memory"):
                    slower, goal = f"{origin}: dd read", 1 / WITHIN
                table.row(f"copy {origin} to {to}", slower, goal)
    return table


def from_disk(places: Mapping[str, Path], size: int, rounds: int, memory: Path) -> Table:
    """Measure one image on the disk: copied to memory, and verified in place, as in a restore from the disk."""
    seconds: Seconds = {}
    with ExitStack() as stack:
        source, tiers = prepared(stack, places, memory)
        to, disk = tiers.tiers
        stack.enter_context(emptied(disk.store))
        copy = Copy(dump(disk.store, source, size), disk)
        pages = disk.store.path / KEY.name / "0001" / "criu" / "pages-1.img"
        past = direct(disk.store.path, "iflag")
        target = to.store.path / "alone"
        turns: tuple[tuple[str, Callable[[], object]], ...] = (
            ("dd read", partial(dd, f"if={pages}", "of=/dev/null", *past)),
            ("copied to memory", partial(tiers.move, copy, to)),
            ("verified reading", partial(disk.store.verify, copy.image)),
            ("dd to memory", partial(dd, f"if={pages}", f"of={target}", *past)),
        )
        for number in range(rounds):
            for what, call in (turns[position] for position in ORDERS[number % len(ORDERS)]):
                to.store.discard(KEY, 1)
                target.unlink(missing_ok=True)
                forget(pages)
                os.sync()
                cpu = cpu_s()
                seconds.setdefault(what, []).append(timed(call))
                seconds.setdefault(f"cpu {what}", []).append(cpu_s() - cpu)
            print(
                f"  round {number + 1}: " + ", ".join(f"{what} {seconds[what][-1]:.1f} s" for what, _ in turns),
                flush=True,
            )
    table = Table(size, seconds)
    print(f"image of {size / (1 << 30):.2f} GiB on the disk, cold, medians of {rounds} rounds")
    for what in ("dd read", "dd to memory"):
        table.peer(what)
    table.row("verified reading", "dd read", 1 / WITHIN)
    table.row("copied to memory", "dd to memory", 1 / WITHIN)
    # Without a goal: the memory has to be allocated, unlike in a read.
    table.row("copied to memory", "dd read", None)
    for what, _ in turns:
        print(f"  CPU time, {what:32} {statistics.median(seconds[f'cpu {what}']):6.2f} s")
    return table


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def prepared(stack: ExitStack, places: Mapping[str, Path], memory: Path) -> tuple[Path, Tiers]:
    """Yield the source, and empty tiers in new directories."""
    source = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory, prefix="bench-"))) / "source"
    dd("if=/dev/urandom", f"of={source}", f"count={PIECE // DD_BLOCK}", "iflag=fullblock")
    made = {
        name: stack.enter_context(tempfile.TemporaryDirectory(dir=path, prefix="bench-"))
        for name, path in places.items()
    }
    tiers = Tiers([
        Tier(name, DirectoryStore(Path(directory), bytes(32)), durable=name != "memory", direct=name != "memory")
        for name, directory in made.items()
    ])  # fmt: skip
    return source, tiers


def main() -> int:
    """Measure and compare; return ``MISSED`` if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--image", type=float, metavar="GIB", help="only an image of this size from the disk")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the node's disk")  # noqa: S108
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")  # noqa: S108
    parser.add_argument("--shared", type=Path, help="a directory on the shared file system")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    places = {"memory": arguments.memory, "disk": arguments.disk}
    if arguments.shared and arguments.image is None:
        places["shared"] = arguments.shared
    size = max(PIECE, int((arguments.image or arguments.gib) * (1 << 30)) // PIECE * PIECE)
    way = all_tiers if arguments.image is None else from_disk
    table = way(places, size, arguments.rounds, arguments.memory)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"size": size, "rows": table.rows, "seconds": table.seconds}, indent=1) + "\n"
        )
    print("\nmissed: " + ", ".join(table.missed) if table.missed else "\nall goals met")
    report(**{str(row["what"]).replace(" ", "_"): 1 / cast("float", row["share"]) for row in table.rows})
    return MISSED if table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
