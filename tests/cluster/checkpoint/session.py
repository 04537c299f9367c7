"""A job's process tree in a compute container: started, dumped and restored with the package."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pynvml

from slurm_affinode.base.pidfd import Id, Namespace, Process
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.inspection import collect, forked_workers, memory_facts
from slurm_affinode.checkpoint.interface import Image, InheritFd, Pages, Tree
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.core.suspension import pair_gpus
from slurm_affinode.model.suspension import GpuFact, JobKey, LiveRun, Manifest, SuspendOption, Versions
from slurm_affinode.suspension.job.process_tree import LinuxProcesses, StoppedJob
from slurm_affinode.suspension.refusals import GpuUseFacts, ImageFacts, JobFacts, refusals

HERE = Path(__file__).parent
PYTHON = sys.executable
UID = 2001
KEY = bytes(range(40))
DEADLINE_S = 40.0
JOB = JobKey("test", 1, 100)


def wait_for(what: str, probe: Callable[[], Any]) -> Any:
    """Poll until the value is true; return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (seen := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)
    return seen


def members(init: int) -> dict[int, int]:
    """Return PID in the namespace -> PID here, for all processes but its PID 1, ``init``."""
    return Namespace(Process(init)).members()


def driver_version() -> str:
    """Return the driver version as NVML reports it."""
    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


class Session:
    """A job's directory, the namespaces of its attempts, and its image."""

    def __init__(self, *, keep: bool = False) -> None:
        self.work = Path("/home/alice/checkpoint-test")
        self.out = self.work.with_suffix(".out")
        images = Path("/shared/checkpoint-test-images" if keep else "/var/lib/slurm-affinode/test-images")
        if not keep:
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir()
            os.chown(self.work, UID, UID)
            self.out.unlink(missing_ok=True)
            shutil.rmtree(images, ignore_errors=True)
        self.store = DirectoryStore(images, KEY)
        self.criu = Criu()
        self.cuda = Cuda(driver_version=driver_version)
        self.shepherds: list[subprocess.Popen[bytes]] = []
        self.init = 0
        self.runs = 0
        self.stopped: set[int] = set()
        self.root = 0
        self.forked: frozenset[Id] = frozenset()
        self.groups: list[int] = []
        """Supplementary groups of the next attempt."""

    @property
    def owner(self) -> User:
        """The owner of the job, with the groups of this attempt."""
        return User(UID, UID, tuple(self.groups))

    # --- Slurm and the shepherd

    def shepherd(self, *command: str) -> int:
        """Start an attempt: namespaces with PID 1, and the command as alice in them."""
        self.runs += 1
        status = Path(f"/tmp/checkpoint-status-{os.getpid()}-{self.runs}") / "status"  # noqa: S108
        status.parent.mkdir()
        with (self.out if command else Path(os.devnull)).open("ab") as out:
            made = subprocess.Popen(
                ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--propagation=private", PYTHON,
                 str(HERE / "shepherd.py"), str(status), str(UID),
                 ",".join(map(str, self.groups)), *command],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, "HOME": "/home/alice", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self.shepherds.append(made)
        wait_for("the shepherd", status.with_suffix(".ready").exists)
        children = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
        self.init, self.status = int(children[0]), status
        return self.init

    def start(self, features: list[str]) -> None:
        """Start the workload and wait until it is ready."""
        self.shepherd(PYTHON, "-Wignore", str(HERE / "workload.py"), str(self.work), *features)
        wait_for("the workload", (self.work / "ready").exists)
        self.see_stopped()
        self.root = min(members(self.init))

    def see_stopped(self) -> None:
        """Record the processes that the workload itself has stopped; they must stay stopped."""
        self.stopped = {process.pid for process in collect(self.init, self.init).processes if process.state == "T"}

    def end(self) -> None:
        """End the attempt."""
        for shepherd in self.shepherds:
            shepherd.kill()
            shepherd.wait()
        self.shepherds.clear()

    # --- the agent

    def users(self) -> list[int]:
        """Return the CUDA processes of the tree."""
        return sorted(self.cuda.users(members(self.init).values()))

    def park(self) -> dict[str, Any]:
        """Move all GPU memory of the tree to host memory."""
        users = self.users()
        self.forked = forked_workers(collect(self.init, min(members(self.init).items())[1]), users)
        for pid in users:
            self.cuda.lock(pid, timeout_ms=5000)
        for pid in users:
            self.cuda.checkpoint(pid)
        return {"users": len(users), "states": [self.cuda.state(pid) for pid in users]}

    def dump(self) -> dict[str, Any]:
        """Dump to a verified image; return its size in bytes, number of processes and sequence number."""
        pids = members(self.init)
        self.see_stopped()
        users = self.users()
        inner = {pid: ns for ns, pid in pids.items()}
        root_ns = min(pids)
        with self.store.begin(JOB, uid=UID, estimate=1 << 20) as writer:
            writer.follow()
            already = frozenset(inner[pid] for pid in self.stopped if pid in inner)
            tree = Tree(Process(self.init).id, pids[root_ns], root_ns, self.owner, self.forked, already)
            self.dump_to(tree, writer.criu_fd)
            image = writer.commit(
                Manifest(
                    key=JOB, seq=0, uid=UID, gid=UID, node=os.uname().nodename, restarts=0,
                    started_epoch=0.0, dumped_epoch=time.time(), option=SuspendOption(),
                    versions=Versions("0", os.uname().release, self.criu.check()), root_pid=root_ns,
                    cuda_pids=tuple(inner[pid] for pid in users), gpus=self.gpus(), gpu_bytes=0,
                    outputs=(), files=(),
                )
            )  # fmt: skip
        self.store.verify(image)
        return {"size": image.manifest.size, "pids": len(pids), "seq": image.manifest.seq}

    def dump_to(self, tree: Tree, directory_fd: int) -> None:
        """Stop the tree and dump it. It stays stopped, or continues if it cannot be dumped."""
        stop = StoppedJob(LinuxProcesses(), tree.init)
        try:
            stop.stop(timeout_s=DEADLINE_S)
            self.criu.dump(tree, directory_fd, timeout_s=60, stop=stop)
        except BaseException:
            stop.release()
            self.continue_processes()
            raise
        finally:
            stop.release()

    def continue_processes(self) -> None:
        """Continue the processes that the workload itself has not stopped."""
        for pid in set(members(self.init).values()) - self.stopped:
            with contextlib.suppress(ProcessLookupError):  # ended since one before it continues
                os.kill(pid, signal.SIGCONT)

    def share(self) -> None:
        """Move the image to the store that all nodes share; the tree on this node ends."""
        path = Path("/shared/checkpoint-test-images")
        shutil.rmtree(path, ignore_errors=True)
        shared = DirectoryStore(path, KEY)
        (image,) = self.store.images()
        assert isinstance(image, Image)
        shared.verify(self.store.copy(image, shared))
        self.store.remove(image)
        shared.close()
        self.end()

    def gpus(self) -> tuple[GpuFact, ...]:
        """Return the GPUs of this node, in the driver's order."""
        pynvml.nvmlInit()
        facts = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            facts[uuid] = GpuFact(uuid, pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return tuple(facts[uuid] for uuid in self.cuda.devices())

    def resume(self) -> None:
        """Roll back: continue the frozen processes and restore their GPU memory."""
        self.continue_processes()
        for pid in self.users():
            if self.cuda.state(pid) == "checkpointed":
                self.cuda.restore(pid)
            if self.cuda.state(pid) == "locked":
                self.cuda.unlock(pid)

    def restore(self, swap: bool = False) -> None:
        """Restore in a new attempt. ``swap``: exchange the contents of two GPUs."""
        self.end()
        init = self.shepherd()
        image = self.store.find(LiveRun(replace(JOB, submit_epoch=200), UID, 1))
        assert image is not None
        self.root = image.manifest.root_pid
        with self.store.verifying(image) as pages, self.out.open("ab") as out:
            fd = self.store.open_criu(image)
            inherit = [InheritFd(out.fileno(), str(self.out).lstrip("/"))] if self.out.exists() else []
            try:
                self.criu.restore(
                    Process(init).id,
                    fd,
                    inherit,
                    root_pid_ns=self.root,
                    timeout_s=60,
                    pages=self.verified(pages),
                    user=self.owner,
                )
            finally:
                os.close(fd)
        new = self.gpus()
        pairs = pair_gpus(image.manifest.gpus, new)
        if swap:
            first, second = (gpu.uuid for gpu in new)
            pairs = {first: second, second: first}
        assert pairs is None or isinstance(pairs, dict)
        pids = members(init)
        for pid in image.manifest.cuda_pids:
            self.cuda.restore(pids[pid], pairs=pairs)
            self.cuda.unlock(pids[pid])

    def verified(self, pages: Pages) -> Pages:
        """Return the verification of the image's memory pages that a restore uses."""
        return pages

    def finish(self) -> dict[str, Any]:
        """Have the workload verify itself and exit; return its report and the wait status that PID 1 received."""
        (self.work / "go").touch()
        wait_for("the workload's end", (self.work / "done").exists)
        record = json.loads((self.work / "done").read_text())
        ended = wait_for("the root's end", self._ended)
        return {"found": record, "status": ended, "output": self.out.read_text()}

    def _ended(self) -> str | None:
        """Return the wait status of the root process that PID 1 received."""
        text = self.status.read_text() if self.status.exists() else ""
        return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{self.root} ")), None)

    # --- queries

    def members(self) -> list[int]:
        """Return the processes in the namespace of the last attempt."""
        return sorted(members(self.init))

    def stored(self) -> list[str]:
        """Return the names of the job's directories in the store."""
        directory = self.store.path / JOB.name
        return sorted(path.name for path in directory.iterdir()) if directory.exists() else []

    def busy(self) -> bool:
        """Return whether an image is being written."""
        return self.store.busy(JOB)

    def refusals(self, adopt: bool = False) -> list[dict[str, str]]:
        """Return the refusals of a suspension.

        ``adopt``: treat stray processes of the namespace as members of the tree.
        """
        root = min(members(self.init).items())[1]
        tree = collect(self.init, root)
        if adopt:
            tree = replace(tree, processes=(*tree.processes, *tree.outside), outside=())
        gpu = GpuUseFacts(self.cuda.capabilities(), frozenset(self.users()), 1 << 20)
        result = refusals(
            JobFacts(batch=True, requeue=True), tree, gpu, memory_facts(self.init), owner=self.owner,
            image=ImageFacts(self.criu.check(), os.uname().release),
        )  # fmt: skip
        return [asdict(item) for item in result]

    def version(self) -> str:
        """Return the version of CRIU."""
        return self.criu.check()

    def gpu_processes(self) -> list[int]:
        """Return the number of processes per GPU according to NVML."""
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles]
