"""A restore from the disk compared with `dd`: time until the process tree of an image that is not cached runs again.

    python benchmarks/bench_restore.py [--gib 10] [--rounds 8]     on a node, as root, with criu 4.1 or newer
    python benchmarks/bench_restore.py --cluster NAME              the same in a compute container of that cluster

Our restore is measured from the search for the image until its tree runs, with all digests verified. Peers, taking
turns with it and with each other: `dd` reading as many bytes in blocks of 8 MiB, through the page cache as CRIU does,
and with direct I/O, and bare `criu restore`. After each round: bare `criu restore` with the image in the page cache, to
measure the time in which CRIU fills the memory. Times are medians over the rounds; ratios are computed within each
round. Target: 1.3 times `dd` through the page cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path

from ratios import MISSED, report
from trees import (
    MIB,
    ORDERS,
    Figures,
    bare_restore,
    forget,
    namespace,
    options,
    our_dump,
    our_restore,
    place_in,
    run,
    seconds,
    tree_of,
)

WITHIN = 1.3
VERIFIED_RESTORE = "our restore, verified"
CACHED = "criu restore, from cache"


def dd(source: Path, *words: str) -> float:
    """Return the seconds that `dd` takes to read a file in large blocks."""
    command = ["dd", f"if={source}", "of=/dev/null", "bs=8M", "status=none", *words]
    return seconds(lambda: subprocess.run(command, check=True))


def measure(work: Path, mib: int, rounds: int) -> Figures:
    """Measure restores of one image that is only on the disk, and their peers."""
    with place_in(work) as place:
        with namespace(work, mib) as init:
            size = our_dump(place, tree_of(init), mib).manifest.size
        (pages,) = (work / "images").rglob("pages-1.img")
        turns: tuple[tuple[str, Callable[[], float]], ...] = (
            (VERIFIED_RESTORE, partial(our_restore, place)),
            ("dd", partial(dd, pages)),
            ("criu restore", partial(bare_restore, work, pages.parent)),
            ("dd by direct I/O", partial(dd, pages, "iflag=direct")),
        )
        durations: dict[str, list[float]] = {name: [] for name in (*dict(turns), CACHED)}
        for number in range(rounds):
            for name, call in (turns[position] for position in ORDERS[number % len(ORDERS)]):
                os.sync()
                forget(work / "images")
                durations[name].append(call())
            dd(pages)
            durations[CACHED].append(bare_restore(work, pages.parent))
            took = ", ".join(f"{name} {seconds_of[-1]:.1f} s" for name, seconds_of in durations.items())
            print(f"  round {number + 1}: {took}", flush=True)
    return Figures(size, durations)


def show(figures: Figures, rounds: int) -> int:
    """Print the results; return ``MISSED`` if the target is missed."""
    mib = figures.size / MIB
    print(f"image of {mib:.0f} MiB only on the disk, medians of {rounds} rounds")
    for name in figures.seconds:
        print(f"  {name:24} {figures.median(name):6.1f} s  {mib / figures.median(name):6.0f} MiB/s")
    ratios = {
        name: figures.paired(truediv, VERIFIED_RESTORE, name) for name in figures.seconds if name != VERIFIED_RESTORE
    }
    for name, ratio in ratios.items():
        print(f"our restore, ratio to {name:24} {ratio:6.2f}" + (f"   target: {WITHIN}" if name == "dd" else ""))
    report(**{f"to_{name.replace(' ', '_')}": ratio for name, ratio in ratios.items()})
    return MISSED if ratios["dd"] > WITHIN else 0


def main() -> int:
    """Measure and compare; return ``MISSED`` if the target is missed."""
    parser = options(__doc__)
    parser.add_argument("--gib", type=float, default=10.0, help="size of the image")
    arguments = parser.parse_args()

    def here(work: Path) -> int:
        return show(measure(work, int(arguments.gib * 1024), arguments.rounds), arguments.rounds)

    return run(Path(__file__).name, arguments, here)


if __name__ == "__main__":
    sys.exit(main())
