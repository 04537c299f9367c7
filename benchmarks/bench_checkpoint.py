"""Dump and restore of a real tree: what is added to bare `criu`, and how near a dump comes to the disk's own speed.

    python benchmarks/bench_checkpoint.py                    on a node, as root, with criu 4.1 or newer
    python benchmarks/bench_checkpoint.py --cluster NAME     the same in a compute container of that cluster
    python benchmarks/bench_checkpoint.py --image 10         one image of 10 GiB: restored from the disk, beside `dd`

Peers, in the same run, on the same tree and the same file system: `criu dump` and `criu restore` with the same options,
and writing and reading as many bytes in order, durable at the end, through the page cache as CRIU does, and past it.
They take turns; times are medians of `--rounds`, and ratios and differences are taken within each round, between what
ran within the same minute, before their median is. Targets: less than 300 ms added to the dump and to the restore of a
small tree (64 MiB), and 80 % of the disk's speed for a large one (4 GiB). Verified restores, and verification by
itself, are measured with the image in the page cache, as after a dump on the same node, and on the disk alone, as on
another node, beside merely reading it.

`--image`: a restore from the disk, none of it in the page cache, from looking for the image until the tree runs again,
every digest verified. Target: 1.3 times `dd` reading as much in blocks of 8 MiB. Bare `criu restore` takes turns with
them.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from pathlib import Path

from slurm_affinode.checkpoint import namespace as ns
from slurm_affinode.checkpoint.criu import Criu
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import Image, Tree
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest, SuspendOption, Versions

ADDED_MS = 300.0
DISK_SHARE = 0.8
WITHIN = 1.3
MIB = 1 << 20

INIT = """
import os, subprocess, sys, time
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
if len(sys.argv) > 2 and os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.dup2(os.open("/dev/null", os.O_RDWR), fd)
    os.closerange(3, 100)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[3], sys.argv[4]])
open(sys.argv[1] + ".up", "w").close()
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        time.sleep(0.005)
"""
WORK = """
import random, sys, time
block = random.randbytes(1 << 20)
held = [bytearray(block) for _ in range(int(sys.argv[1]))]
for number, one in enumerate(held):
    one[:8] = number.to_bytes(8, "little")
open(sys.argv[2] + ".ready", "w").close()
while True:
    time.sleep(60)
"""


FACTS = Manifest(
    key=JobKey("bench", 1, 1), seq=0, uid=0, gid=0, node="", restarts=0, started_epoch=0.0, dumped_epoch=0.0,
    option=SuspendOption(), versions=Versions("", "", ""), root_pid=0, cuda_pids=(), gpus=(), gpu_bytes=0,
    outputs=(), files=(),
)  # fmt: skip
NAMES = {
    "bare_dump": "criu dump, made durable",
    "our_dump": "our dump: digested, signed, durable",
    "write": "writing as many bytes",
    "write_direct": "the same with direct I/O",
    "bare_restore": "criu restore",
    "our_restore": "our restore, verified, image in the cache",
    "restore_cold": "the same, image on the disk",
    "verify": "verification alone, image in the cache",
    "verify_cold": "the same, image on the disk",
    "read_cold": "reading it from the disk",
    "read_direct": "the same with direct I/O",
}


@dataclass(frozen=True)
class Figures:
    """Bytes, and seconds of each round."""

    size: int
    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Of one thing that was measured, seconds."""
        return statistics.median(self.seconds[name])

    def paired(self, combine: Callable[..., float], *names: str) -> float:
        """The median over the rounds of what ``combine`` makes of the seconds of each."""
        return statistics.median(combine(*one) for one in zip(*(self.seconds[n] for n in names), strict=True))


def wait_for(path: Path) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{path} did not come")
        time.sleep(0.01)


@contextmanager
def namespace(work: Path, mib: int = 0) -> Iterator[int]:
    """PID 1 of a namespace, with a tree of one process that holds so many MiB, or without."""
    token = work / f"run-{time.monotonic_ns()}"
    command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", sys.executable, "-c", INIT, str(token)]
    if mib:
        command += [WORK, str(mib), str(token)]
    made = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        wait_for(token.with_name(token.name + (".ready" if mib else ".up")))
        children = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
        yield int(children[0])
    finally:
        made.kill()
        made.wait()


def sync(directory: Path) -> None:
    """Make a directory's files durable, as ours are."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def bare_dump(init: int, root_ns: int, directory: Path) -> float:
    """`criu dump` with the same options."""
    directory.mkdir()
    began = time.monotonic()
    subprocess.run(
        ["nsenter", f"--target={init}", "--pid", "--mount", "--", "criu", "dump", f"--tree={root_ns}",
         f"--images-dir={directory}", "--log-file=dump.log", "--leave-running", "--manage-cgroups=ignore",
         "--shell-job", "--tcp-close", "--ext-unix-sk", "--timeout=600"],
        check=True, capture_output=True,
    )  # fmt: skip
    sync(directory)
    return time.monotonic() - began


def bare_restore(work: Path, directory: Path) -> float:
    """`criu restore` with the same options."""
    with namespace(work) as init:
        inside = ["nsenter", f"--target={init}", "--pid", "--mount", "--"]
        subprocess.run([*inside, "sh", "-c", "echo 5000 >/proc/sys/kernel/ns_last_pid"], check=True)
        began = time.monotonic()
        subprocess.run(
            [*inside, "criu", "restore", f"--images-dir={directory}", f"--work-dir={work}", "--log-file=restore.log",
             "--restore-detached", "--manage-cgroups=ignore", "--shell-job", "--tcp-close", "--ext-unix-sk"],
            check=True, capture_output=True,
        )  # fmt: skip
        return time.monotonic() - began


def write_alone(path: Path, size: int) -> float:
    """So many bytes in order, durable at the end."""
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
    """The same past the page cache: as fast as the disk goes, whatever else the node's memory is used for."""
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


def forget(directory: Path) -> None:
    """Have the next reader of a directory's files go to the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_alone(directory: Path) -> float:
    """All files of a directory, in order."""
    began = time.monotonic()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(4 * MIB):
                    pass
    return time.monotonic() - began


def read_direct(directory: Path) -> float:
    """The same past the page cache."""
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


def our_restore(work: Path, store: DirectoryStore, criu: Criu) -> float:
    """The newest image, from looking for it until its tree runs, every digest verified."""
    with namespace(work) as init:
        began = time.monotonic()
        image = store.find(LiveRun(replace(FACTS.key, submit_epoch=2), 0, 1))
        assert image is not None
        with store.verifying(image) as sound:
            fd = store.open_criu(image)
            criu.restore(init, fd, [], root_pid_ns=image.manifest.root_pid, timeout_s=600, sound=sound)
            os.close(fd)
        return time.monotonic() - began


def seconds(call: Callable[[], object]) -> float:
    """That a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""Each comes behind each other once (Williams, Australian Journal of Scientific Research 2, 1949): a disk that has just
been written to is slower for whoever comes next."""


def measure(work: Path, mib: int, rounds: int) -> Figures:
    """One size of tree."""
    store, criu, key = DirectoryStore(work / "images", bytes(32)), Criu(), FACTS.key
    criu.check()
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    size = 0

    def bare() -> None:
        found["bare_dump"].append(bare_dump(init, root_ns, work / "bare"))

    def ours() -> None:
        began = time.monotonic()
        with store.begin(key, uid=0, estimate=mib * MIB) as writer:
            writer.follow()
            criu.dump(Tree(init, root, root_ns), writer.criu_fd, timeout_s=600)
            images.append(writer.commit(replace(FACTS, root_pid=root_ns)))
        found["our_dump"].append(time.monotonic() - began)
        for pid in ns.members(init).values():
            os.kill(pid, signal.SIGCONT)

    def write() -> None:
        found["write"].append(write_alone(work / "alone", mib * MIB))

    def direct() -> None:
        found["write_direct"].append(write_direct(work / "alone", mib * MIB))

    images: list[Image] = []
    for number in range(rounds):
        with namespace(work, mib) as init:
            ((root_ns, root),) = ns.members(init).items()
            turns = (bare, ours, write, direct)
            for turn in (turns[position] for position in ORDERS[number % len(ORDERS)]):
                os.sync()
                turn()
        image = images[-1]
        size = image.manifest.size
        found["bare_restore"].append(bare_restore(work, work / "bare"))
        found["verify"].append(seconds(partial(store.verify, image)))
        found["our_restore"].append(our_restore(work, store, criu))
        colds: tuple[tuple[str, Callable[[], float]], ...] = (
            ("verify_cold", partial(seconds, partial(store.verify, image))),
            ("restore_cold", partial(our_restore, work, store, criu)),
            ("read_cold", partial(read_alone, work / "images")),
            ("read_direct", partial(seconds, partial(read_direct, work / "images"))),
        )
        for name, call in (colds[position] for position in ORDERS[number % len(ORDERS)]):
            forget(work / "images")
            found[name].append(call())
        store.remove(image)
        shutil.rmtree(work / "bare")
    store.close()
    return Figures(size, found)


def from_disk(work: Path, mib: int, rounds: int) -> int:
    """Restores of one large image that is on the disk alone; 1 where they take too long."""
    store, criu, key = DirectoryStore(work / "images", bytes(32)), Criu(), FACTS.key
    criu.check()
    with namespace(work, mib) as init, store.begin(key, uid=0, estimate=mib * MIB) as writer:
        ((root_ns, root),) = ns.members(init).items()
        writer.follow()
        criu.dump(Tree(init, root, root_ns), writer.criu_fd, timeout_s=600)
        size = writer.commit(replace(FACTS, root_pid=root_ns)).manifest.size
    (criu_files,) = (path.parent for path in (work / "images").rglob("pages-1.img"))
    pages = str(criu_files / "pages-1.img")

    def dd(*words: str) -> float:
        return seconds(lambda: subprocess.run(["dd", f"if={pages}", "of=/dev/null", *words], check=True))

    found: dict[str, list[float]] = {}
    turns: tuple[tuple[str, Callable[[], float]], ...] = (
        ("our restore, verified", partial(our_restore, work, store, criu)),
        ("dd", partial(dd, "bs=8M", "status=none")),
        ("criu restore", partial(bare_restore, work, criu_files)),
        ("dd by direct I/O", partial(dd, "bs=8M", "status=none", "iflag=direct")),
    )
    for number in range(rounds):
        for name, call in (turns[position] for position in ORDERS[number % len(ORDERS)]):
            os.sync()
            forget(work / "images")
            found.setdefault(name, []).append(call())
        print(f"  round {number + 1}: " + ", ".join(f"{name} {found[name][-1]:.1f} s" for name, _ in turns), flush=True)
    store.close()
    print(f"image of {size / MIB:.0f} MiB on the disk alone, medians of {rounds} rounds")
    figures = Figures(size, found)
    for name, _ in turns:
        print(f"  {name:24} {figures.median(name):6.1f} s  {size / MIB / figures.median(name):6.0f} MiB/s")
    ratios = {
        name: figures.paired(truediv, "our restore, verified", name)
        for name, _ in turns
        if name != "our restore, verified"
    }
    for name, ratio in ratios.items():
        print(f"our restore, times {name:20} {ratio:6.2f}" + (f"   target: {WITHIN}" if name == "dd" else ""))
    return int(ratios["dd"] > WITHIN)


def show(mib: int, figures: Figures) -> None:
    """What was found."""
    print(f"\ntree of {mib} MiB, image of {figures.size / MIB:.0f} MiB")
    for name, what in NAMES.items():
        took = figures.median(name)
        each = " ".join(f"{one * 1000:.0f}" for one in figures.seconds[name])
        print(f"  {what:44} {took * 1000:7.0f} ms  {figures.size / MIB / took:6.0f} MiB/s  ({each})")


def in_container(cluster: str, arguments: list[str]) -> int:
    """Run this very file, with this checkout's package, on a compute node of a cluster."""
    repository = Path(__file__).resolve().parents[1]
    container = f"{cluster}_c1_1"
    target = "/tmp/bench-checkpoint"  # noqa: S108 - in the container
    pack = subprocess.Popen(
        ["tar", "-C", str(repository), "--exclude=__pycache__", "-cf", "-", "slurm_affinode", "benchmarks"],
        stdout=subprocess.PIPE,
    )
    unpack = f"rm -rf {target} && mkdir {target} && tar -C {target} -xf -"
    subprocess.run(["docker", "exec", "-i", container, "sh", "-c", unpack], stdin=pack.stdout, check=True)
    command = ["/opt/slurm-affinode/bin/python", f"{target}/benchmarks/bench_checkpoint.py", *arguments]
    return subprocess.run(["docker", "exec", f"--env=PYTHONPATH={target}", container, *command], check=False).returncode


def main() -> int:
    """Measure, compare, 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="size of the large tree")
    parser.add_argument("--small-mib", type=int, default=64)
    parser.add_argument(
        "--image", type=float, metavar="GIB", help="only restores of an image of this size from the disk"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/lib/slurm-affinode"), help="on the disk to measure"
    )
    parser.add_argument("--cluster", help="name of a container cluster to run in")
    arguments = parser.parse_args()
    if arguments.cluster:
        passed = [f"--mib={arguments.mib}", f"--small-mib={arguments.small_mib}", f"--rounds={arguments.rounds}"]
        passed += [] if arguments.image is None else [f"--image={arguments.image}"]
        return in_container(arguments.cluster, passed)
    if os.geteuid() != 0 or shutil.which("criu") is None:
        print("not measured: it needs root and criu 4.1 or newer (or --cluster NAME)")
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-") as name:
        if arguments.image is not None:
            return from_disk(Path(name), int(arguments.image * 1024), arguments.rounds)
        small = measure(Path(name), arguments.small_mib, arguments.rounds)
        show(arguments.small_mib, small)
        large = measure(Path(name), arguments.mib, arguments.rounds)
        show(arguments.mib, large)
    dump_ms = small.paired(lambda ours, bare: (ours - bare) * 1000, "our_dump", "bare_dump")
    restore_ms = small.paired(lambda ours, bare: (ours - bare) * 1000, "our_restore", "bare_restore")
    share = large.paired(truediv, "write", "our_dump")
    print(f"\nadded to the dump of the small tree     {dump_ms:6.0f} ms   target: less than {ADDED_MS:.0f}")
    print(f"added to its restore, with verification {restore_ms:6.0f} ms   target: less than {ADDED_MS:.0f}")
    print(f"large dump, share of the disk's speed   {share:6.2f}      target: at least {DISK_SHARE}")
    direct, bare = large.paired(truediv, "write_direct", "our_dump"), large.paired(truediv, "write_direct", "bare_dump")
    print(f"large dump, share of direct I/O's speed {direct:6.2f}      bare criu: {bare:.2f}")
    print(f"large dump, times bare criu             {large.paired(truediv, 'our_dump', 'bare_dump'):6.2f}")
    print(f"large restore, times bare criu          {large.paired(truediv, 'our_restore', 'bare_restore'):6.2f}")
    print(f"verification, times reading from disk   {large.paired(truediv, 'verify_cold', 'read_cold'):6.2f}")
    back, back_direct = (large.paired(truediv, peer, "restore_cold") for peer in ("read_cold", "read_direct"))
    print(f"large restore from the disk, verified, share of reading it: {back:.2f}, by direct I/O {back_direct:.2f}")
    return 0 if dump_ms < ADDED_MS and restore_ms < ADDED_MS and share >= DISK_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
