"""How near images come to the speed of the tiers that they are in: dump, copies between tiers, verified reading.

    python benchmarks/bench_tiers.py [--gib 1] [--rounds 3] [--disk DIR] [--memory DIR] [--shared DIR]

Peers, in the same run, on the same file systems, taking turns: `dd` with blocks of 8 MiB past the page cache (through
it where the file system does not know better), durable at the end. Each figure is the best of the rounds, on both
sides: other work on the machine only ever adds. Goals: 80 % of the tier's own sequential speed for a dump (written by
another process as CRIU does it, digested, signed, durable) and for a restore's reading (cold, every digest verified),
and an image from the disk to memory within 1.3 times of `dd` reading it. `--gib 10` is the size that the goal names.
`--shared` is a directory on the shared file system, to measure it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import Image
from slurm_affinode.checkpoint.tier import Copy, Tier
from slurm_affinode.checkpoint.tiers import Tiers
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest, SuspendOption, Versions

SHARE = 0.8
WITHIN = 1.3
KEY = JobKey("bench", 1, 1)
RUN = LiveRun(JobKey("bench", 1, 2), 0, 1)
FACTS = Manifest(
    key=KEY, seq=0, uid=0, gid=0, node="", restarts=0, started_epoch=0.0, dumped_epoch=0.0, option=SuspendOption(),
    versions=Versions("", "", ""), root_pid=0, cuda_pids=(), gpus=(), gpu_bytes=0, outputs=(), files=(),
)  # fmt: skip


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def dd(*words: str) -> None:
    """dd, in large blocks."""
    subprocess.run(["dd", "bs=8M", "status=none", *words], check=True)


def direct(path: Path, word: str) -> list[str]:
    """``iflag=direct`` where the file system knows it."""
    probe = path / "probe"
    done = subprocess.run(
        ["dd", "if=/dev/zero", f"of={probe}", "bs=8M", "count=1", "oflag=direct", "status=none"],
        capture_output=True, check=False,
    )  # fmt: skip
    probe.unlink(missing_ok=True)
    return [f"{word}=direct"] if done.returncode == 0 else []


def forget(path: Path) -> None:
    """Drop a file, or the files below a directory, from the page cache."""
    for one in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        fd = os.open(one, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def dump(store: DirectoryStore, source: Path, size: int) -> Image:
    """An image whose pages another process writes, as CRIU does."""
    with store.begin(KEY, uid=0, estimate=size) as writer:
        writer.follow()
        subprocess.run(
            ["dd", "bs=1M", "status=none", f"if={source}", f"of=/proc/self/fd/{writer.criu_fd}/pages-1.img"],
            check=True, pass_fds=(writer.criu_fd,),
        )  # fmt: skip
        return writer.commit(FACTS)


@contextmanager
def emptied(store: DirectoryStore) -> Iterator[None]:
    """Without images, before and after."""
    store.discard(KEY, 1)
    yield
    store.discard(KEY, 1)


def measure(name: str, tier: Tier, source: Path, size: int, rounds: int) -> dict[str, float]:
    """Seconds for one tier: dd writing and reading, dump, verified reading."""
    place, found = tier.store.path, dict[str, list[float]]()
    alone = place / "alone"
    for _ in range(rounds):
        found.setdefault("dd write", []).append(
            timed(lambda: dd(f"if={source}", f"of={alone}", *direct(place, "oflag"), "conv=fsync"))
        )
        forget(alone)
        found.setdefault("dd read", []).append(
            timed(lambda: dd(f"if={alone}", "of=/dev/null", *direct(place, "iflag")))
        )
        alone.unlink()
        with emptied(tier.store):
            found.setdefault("dump", []).append(timed(lambda: dump(tier.store, source, size)))
            image = tier.store.get(KEY.name, 1)
            forget(place)
            found.setdefault("verified reading", []).append(timed(partial(tier.store.verify, image)))
    return {what: min(values) for what, values in found.items()}


def moves(tiers: Tiers, source: Path, size: int, rounds: int) -> dict[tuple[str, str], float]:
    """Seconds for each copy from a tier to another."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for origin in tiers.tiers:
            with emptied(origin.store):
                copy = Copy(dump(origin.store, source, size), origin)
                for to in tiers.tiers:
                    if to is not origin:
                        with emptied(to.store):
                            forget(origin.store.path)
                            found.setdefault((origin.name, to.name), []).append(timed(partial(tiers.move, copy, to)))
    return {what: min(values) for what, values in found.items()}


def main() -> int:
    """Measure, compare; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the node's disk")  # noqa: S108
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")  # noqa: S108
    parser.add_argument("--shared", type=Path, help="a directory on the shared file system")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    places = {"memory": arguments.memory, "disk": arguments.disk}
    if arguments.shared:
        places["shared"] = arguments.shared
    size = int(arguments.gib * (1 << 30)) // (1 << 20) * (1 << 20)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=arguments.memory, prefix="bench-") as kept:
        source = Path(kept) / "source"
        dd("if=/dev/urandom", f"of={source}", f"count={size // (8 << 20)}")
        size = source.stat().st_size
        made = {name: tempfile.TemporaryDirectory(dir=path, prefix="bench-") for name, path in places.items()}
        try:
            tiers = Tiers([
                Tier(name, DirectoryStore(Path(one.name), bytes(32)), durable=name != "memory", direct=name != "memory")
                for name, one in made.items()
            ])  # fmt: skip
            base = {tier.name: measure(tier.name, tier, source, size, arguments.rounds) for tier in tiers.tiers}
            copied = moves(tiers, source, size, arguments.rounds)
        finally:
            for one in made.values():
                one.cleanup()
    missed = []

    def row(what: str, seconds: float, peer: str, peer_s: float, goal: float | None) -> None:
        share = peer_s / seconds
        rows.append({"what": what, "seconds": seconds, "peer": peer, "peer_s": peer_s, "share": share, "goal": goal})
        met = "" if goal is None else f"goal {goal:.2f}  {'met' if share >= goal else 'MISSED'}"
        print(f"  {what:28} {size / seconds / 1e6:7.0f} MB/s  {share:5.2f} of {peer:12} {met}")
        if goal is not None and share < goal:
            missed.append(what)

    print(f"image of {size / (1 << 30):.1f} GiB, the best of {arguments.rounds} rounds")
    for name, found in base.items():
        for what in ("dd write", "dd read"):
            print(f"  {name + ': ' + what:28} {size / found[what] / 1e6:7.0f} MB/s")
    for name, found in base.items():
        goal = None if name == "memory" else SHARE
        row(f"dump to {name}", found["dump"], "dd write", found["dd write"], goal)
        row(f"verified reading from {name}", found["verified reading"], "dd read", found["dd read"], goal)
    for (origin, to), seconds in copied.items():
        # A copy can be no faster than the slower of its ends.
        slower = max((base[origin]["dd read"], f"{origin} read"), (base[to]["dd write"], f"{to} write"))
        goal = SHARE if to != "memory" else None
        if (origin, to) == ("disk", "memory"):
            slower, goal = (base[origin]["dd read"], f"{origin} read"), 1 / WITHIN
        row(f"copy {origin} to {to}", seconds, slower[1], slower[0], goal)
    if arguments.json:
        arguments.json.write_text(json.dumps({"size": size, "rows": rows}, indent=1) + "\n")
    print("\nmissed: " + ", ".join(missed) if missed else "\nall goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
