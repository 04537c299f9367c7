"""Process trees to dump and restore with bare `criu` and with our code, and rounds in which peers take turns.

Shared by `bench_checkpoint.py` and `bench_restore.py`, which run on a node, as root, with criu 4.1 or newer, or with
`--cluster NAME` in a compute container of that cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ratios import VARIABLE, report

from slurm_affinode.base.pidfd import Namespace, Process, ProcessGoneError
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.interface import Image, Tree
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest, SuspendOption, Versions
from slurm_affinode.suspension.job.process_tree import LinuxProcesses, StoppedJob

MIB = 1 << 20
OWNER = User(65534, 65534)
"""Of the trees: root acts for no tree of its own."""
INIT = """
import os, subprocess, sys, time
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
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
    key=JobKey("bench", 1, 1), seq=0, uid=OWNER.uid, gid=OWNER.gid, node="node", restarts=0, started_epoch=0.0,
    dumped_epoch=0.0, option=SuspendOption(), versions=Versions("", "", ""), root_pid=0, cuda_pids=(), gpus=(),
    gpu_bytes=0, outputs=(), files=(),
)  # fmt: skip
ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""Orders in which each peer follows each other peer once (Williams, Australian Journal of Scientific Research 2, 1949):
a disk that has just been written to is slower for the next peer."""


@dataclass(frozen=True)
class Figures:
    """Size in bytes, and seconds of each round."""

    size: int
    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Return the seconds of one measurement."""
        return statistics.median(self.seconds[name])

    def paired(self, combine: Callable[..., float], *names: str) -> float:
        """Return the median over the rounds of ``combine`` of the seconds of each."""
        return statistics.median(combine(*values) for values in zip(*(self.seconds[n] for n in names), strict=True))


@dataclass(frozen=True)
class Place:
    """A directory on the disk to measure, with a store of images in ``images`` below it."""

    work: Path
    store: DirectoryStore
    criu: Criu


@contextmanager
def place_in(work: Path) -> Iterator[Place]:
    """Return the place, ready for dumps and restores; raises an error of criu if something is missing."""
    place = Place(work, DirectoryStore(work / "images", bytes(32)), Criu())
    place.criu.check()
    yield place
    place.store.close()


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{path} was not created")
        time.sleep(0.01)


@contextmanager
def namespace(work: Path, mib: int = 0) -> Iterator[int]:
    """Yield PID 1 of a new namespace; with ``mib``: with a process that has allocated this much memory."""
    work.chmod(0o711)
    signals = work / "signals"  # the processes report there as their user
    signals.mkdir(exist_ok=True)
    signals.chmod(0o777)
    token = signals / f"run-{time.monotonic_ns()}"
    command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", sys.executable, "-c", INIT, str(token)]
    if mib:
        command += [WORK, str(mib), str(token)]
    made = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd="/")
    try:
        wait_for(token.with_name(token.name + (".ready" if mib else ".up")))
        children = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
        with Process(int(children[0])) as init:
            try:
                yield init.pid
            finally:
                # It has changed its user, and so receives no signal when its parent ends.
                with suppress(ProcessGoneError):
                    init.signal(signal.SIGKILL)
    finally:
        made.kill()
        made.wait()


def members(init: int) -> dict[int, int]:
    """Return PID in the namespace -> PID here, for all processes but its PID 1, ``init``."""
    return Namespace(Process(init)).members()


def tree_of(init: int) -> Tree:
    """Return the only process below PID 1 of a namespace."""
    ((root_ns, root),) = members(init).items()
    return Tree(Process(init).id, root, root_ns, OWNER)


def our_dump(place: Place, tree: Tree, mib: int) -> Image:
    """Dump a tree of this size; return the image: hashed, signed, synced to disk. The tree stays stopped."""
    stop = StoppedJob(LinuxProcesses(), tree.init)
    try:
        stop.stop(timeout_s=60)
        with place.store.begin(FACTS.key, uid=OWNER.uid, estimate=mib * MIB) as writer:
            writer.follow()
            place.criu.dump(tree, writer.criu_fd, timeout_s=600, stop=stop)
            return writer.commit(replace(FACTS, root_pid=tree.root_pid_ns))
    finally:
        stop.release()


def bare_restore(work: Path, directory: Path) -> float:
    """Run `criu restore` with the same options; return its seconds."""
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


def forget(directory: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def our_restore(place: Place) -> float:
    """Restore the newest image, with all digests verified; return the seconds from the search until its tree runs."""
    with namespace(place.work) as init:
        began = time.monotonic()
        image = place.store.find(LiveRun(replace(FACTS.key, submit_epoch=2), OWNER.uid, 1))
        assert image is not None
        with place.store.verifying(image) as pages:
            fd = place.store.open_criu(image)
            place.criu.restore(
                Process(init).id,
                fd,
                [],
                root_pid_ns=image.manifest.root_pid,
                timeout_s=600,
                pages=pages,
                user=OWNER,
            )
            os.close(fd)
        return time.monotonic() - began


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/lib/slurm-affinode"), help="on the disk to measure"
    )
    parser.add_argument("--cluster", help="name of a container cluster to run in")
    return parser


def run(script: str, arguments: argparse.Namespace, here: Callable[[Path], int]) -> int:
    """Call ``here`` with a temporary directory, or run the script on the cluster."""
    if arguments.cluster:
        words = {name: value for name, value in vars(arguments).items() if name != "cluster"}
        passed = [f"--{name.replace('_', '-')}={value}" for name, value in words.items()]
        return in_container(arguments.cluster, script, passed)
    if os.geteuid() != 0 or shutil.which("criu") is None:
        print("not measured: it needs root and criu 4.1 or newer (or --cluster NAME)")
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-") as name:
        return here(Path(name))


def in_container(cluster: str, script: str, arguments: Sequence[str]) -> int:
    """Run one of these scripts, with the package of this checkout, on a compute node of a cluster."""
    repository = Path(__file__).resolve().parents[1]
    container = f"{cluster}_c1_1"
    target = "/tmp/benchmarks"  # noqa: S108 - in the container
    pack = subprocess.Popen(
        ["tar", "-C", str(repository), "--exclude=__pycache__", "-cf", "-", "slurm_affinode", "benchmarks"],
        stdout=subprocess.PIPE,
    )
    unpack = f"rm -rf {target} && mkdir {target} && tar -C {target} -xf -"
    subprocess.run(["docker", "exec", "-i", container, "sh", "-c", unpack], stdin=pack.stdout, check=True)
    ratios = f"{target}/ratios.json"
    command = ["/opt/slurm-affinode/bin/python", f"{target}/benchmarks/{script}", *arguments]
    environment = [f"--env=PYTHONPATH={target}", f"--env={VARIABLE}={ratios}"]
    status = subprocess.run(["docker", "exec", *environment, container, *command], check=False).returncode
    measured = subprocess.run(["docker", "exec", container, "cat", ratios], check=False, capture_output=True).stdout
    if measured:
        report(**json.loads(measured))
    return status
