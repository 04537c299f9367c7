"""Seconds of each phase of a suspension: with our code, and with only the driver's calls, in turns on one process."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu import tree
from gpu.machine import MIB, Machine
from gpu.programs import HERE, Program, ProgramError, Programs, end, looked_after

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.cuda.driver import Driver
from slurm_affinode.checkpoint.interface import CudaError, Feature
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.suspension import memory

PHASES = ("lock", "checkpoint", "restore", "unlock")
LOCK_MS = 30_000
PR_SET_THP_DISABLE = 41
STORAGE = Path(__file__).resolve().with_name("custom_storage.py")


class Bare:
    """Only the driver's calls, from this process."""

    def __init__(self) -> None:
        self._driver = Driver()
        self._driver.initialise()
        self._lock_args = self._driver.load().CUcheckpointLockArgs()
        self._lock_args.timeoutMs = LOCK_MS

    def phases(self, pid: int) -> dict[str, Callable[[], Any]]:
        """Return the timed calls."""
        call = self._driver.call
        return {
            "lock": lambda: call("cuCheckpointProcessLock", pid, self._lock_args),
            "checkpoint": lambda: call("cuCheckpointProcessCheckpoint", pid, None),
            "restore": lambda: call("cuCheckpointProcessRestore", pid, None),
            "unlock": lambda: call("cuCheckpointProcessUnlock", pid, None),
        }


@dataclass
class Product:
    """The calls of the agent: through the helper, with a check of free memory before a restore."""

    cuda: Cuda
    nvml: NvmlDriver
    needs: dict[str, int] = field(default_factory=dict)

    def free(self) -> dict[str, int | None]:
        """Return free bytes of the required GPUs, by UUID."""
        devices = [device for device in self.nvml.devices() if device.mig is None and device.uuid in self.needs]
        by_uuid = {device.uuid: self.nvml.free_mib(device) for device in devices}
        return {uuid: None if mib is None else int(mib * MIB) for uuid, mib in by_uuid.items()}

    def restore(self, pid: int) -> None:
        """Raise ``CudaError``, before the driver is called, if there is not enough memory."""
        why = memory.shortage(self.needs, self.free())
        if why is not None:
            raise CudaError(why)
        self.cuda.restore(pid)

    def phases(self, pid: int) -> dict[str, Callable[[], Any]]:
        """Return the timed calls."""
        return {
            "lock": lambda: self.cuda.lock(pid, timeout_ms=LOCK_MS),
            "checkpoint": lambda: self.cuda.checkpoint(pid),
            "restore": lambda: self.restore(pid),
            "unlock": lambda: self.cuda.unlock(pid),
        }


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def sizes(machine: Machine, nvml: NvmlDriver, requested_mib: list[int]) -> tuple[list[int], list[str]]:
    """Return the sizes that fit into GPU and host memory, and the reasons why the others do not."""
    free = (nvml.free_mib(nvml.devices()[0]) or 0) * 0.97 - 1024 * (not machine.emulated)
    fit, left_out = [], []
    for mib in requested_mib:
        if mib > free:
            left_out.append(f"{mib / 1024:g} GiB: the GPU has {free / 1024:.1f} GiB free")
        elif mib > machine.host_available_mib * 0.85:
            left_out.append(f"{mib / 1024:g} GiB: the host has {machine.host_available_mib / 1024:.1f} GiB available")
        else:
            fit.append(mib)
    return fit, left_out


def staging(run: Programs, product: Product, bare: Bare, mib: int, rounds: int) -> dict[str, Any]:
    """Measure all phases for one size: medians over the rounds, in turns; ratios of the fastest rounds."""
    program = run.start()
    program.ask("setup", mib=mib, seed=1, graph=False)
    digest = program.ask("digest") if mib <= 10 * 1024 else program.ask("steps", count=1)
    seconds: dict[str, dict[str, list[float]]] = {side: {phase: [] for phase in PHASES} for side in ("bare", "ours")}
    product.needs = {product.nvml.devices()[0].uuid: mib * MIB}
    program.restored = True
    for number in range(rounds + 1):  # the first one is a warm-up
        turns: list[tuple[str, Bare | Product]] = [("bare", bare), ("ours", product)]
        for side, way in turns[:1] if not number else turns[:: -1 if number % 2 else 1]:
            for name, action in way.phases(program.pid).items():
                took = timed(action)
                if number:
                    seconds[side][name].append(took)
    if mib <= 10 * 1024 and program.ask("digest") != digest:
        raise AssertionError("the restored memory differs")
    run.close()
    medians = {
        side: {phase: statistics.median(values) for phase, values in phases.items()} for side, phases in seconds.items()
    }
    # Disturbances (other work on the host) only add time: the fastest round has none.
    fastest = {side: {phase: min(values) for phase, values in phases.items()} for side, phases in seconds.items()}
    out = {side: medians[side]["lock"] + medians[side]["checkpoint"] for side in medians}
    back = {side: medians[side]["restore"] + medians[side]["unlock"] for side in medians}
    return {
        "bytes": mib * MIB,
        "rounds": rounds,
        "seconds": medians,
        "out_gbps": {side: mib * MIB / 1e9 / out[side] for side in out},
        "in_gbps": {side: mib * MIB / 1e9 / back[side] for side in back},
        "added": sum(fastest["ours"].values()) / sum(fastest["bare"].values()) - 1,
        "wake_ratio": (fastest["ours"]["restore"] + fastest["ours"]["unlock"]) / fastest["bare"]["restore"],
    }


def pages(run: Programs, bare: Bare, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Measure the driver's staging with and without transparent huge pages in the suspended process."""
    entries = []
    for name, disable in (("default of the system", False), ("off in the process (prctl)", True)):
        with thp_disabled(disable):
            program = run.start()
        program.ask("setup", mib=mib, seed=1, graph=False)
        program.restored = True
        taken: dict[str, list[float]] = {stage: [] for stage in PHASES}
        for _ in range(rounds):
            for phase, action in bare.phases(program.pid).items():
                taken[phase].append(timed(action))
        run.close()
        medians = {stage: statistics.median(values) for stage, values in taken.items()}
        entries.append({"huge_pages": name, "bytes": mib * MIB, "seconds": medians})
    return entries


@contextlib.contextmanager
def thp_disabled(disable: bool) -> Iterator[None]:
    """Disable transparent huge pages for child processes started in this context."""
    import ctypes  # noqa: PLC0415 - only used here

    libc = ctypes.CDLL(None)
    if disable:
        libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        if disable:
            libc.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def stored(run: Programs, product: Product, mib: int, directory: Path, rounds: int) -> dict[str, Any] | str:
    """Measure custom storage (driver 615), copied to files and back; return the reason if it is not available."""
    try:
        product.cuda.require(Feature.CUSTOM_STORAGE)
    except CudaError as error:
        return str(error)
    storage = run.start(str(STORAGE))  # before the program, so that it ends after it
    program = run.start()
    program.ask("setup", mib=mib, seed=1, graph=False)
    program.restored = True
    uuid = product.nvml.devices()[0].uuid
    taken: dict[str, list[float]] = {"out": [], "in": []}
    try:
        with tempfile.TemporaryDirectory(dir=directory) as place:
            for _ in range(rounds):
                product.cuda.lock(program.pid, timeout_ms=LOCK_MS)
                out = storage.ask("checkpoint", pid=program.pid, directory=place, held={uuid: mib * MIB})
                taken["out"].append(out["seconds"])
                back = storage.ask("restore", pid=program.pid, directory=place, stored=out["result"])
                taken["in"].append(back["seconds"])
                product.cuda.unlock(program.pid)
                for entry in out["result"]:
                    Path(place, entry["file"]).unlink()
    except (CudaError, OSError, ProgramError) as error:
        return f"{directory}: {error}"
    finally:
        run.close()
    medians = {direction: statistics.median(values) for direction, values in taken.items()}
    return {"directory": str(directory), "file_system": file_system(directory), "bytes": mib * MIB, "seconds": medians}


def file_system(directory: Path) -> str:
    """Return the type of the file system; ``tmpfs`` is memory."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    here = directory.resolve()
    above = {Path(point.encode().decode("unicode_escape")): kind for _, point, kind, *_ in mounts}
    return next((above[path] for path in (here, *here.parents) if path in above), "unknown")


def parallel(run: Programs, nvml: NvmlDriver, mib: int, counts: tuple[int, ...] = (2, 4)) -> list[dict[str, Any]]:
    """Measure the same memory in several processes, in turn and at once, as the agent moves those of a job."""
    entries = []
    for count in counts:
        started = [run.start() for _ in range(count)]
        for program in started:
            program.ask("setup", mib=max(8, mib // count), seed=1, graph=False)
            program.restored = True
        try:
            with closing(Cuda(driver_version=nvml.version)) as cuda:
                cuda.devices()  # its helper has started and initialized CUDA, which a restore requires
                pids = [program.pid for program in started]
                entries.append({
                    "processes": count, "bytes": count * max(8, mib // count) * MIB,
                    "in_turn": _moved(cuda, [[pid] for pid in pids]), "at_once": _moved(cuda, [pids]),
                })  # fmt: skip
        finally:
            run.close()
    return entries


def _moved(cuda: Cuda, calls: list[list[int]]) -> dict[str, float]:
    """Suspend and restore processes, those of one call at once."""
    pids = [pid for pids in calls for pid in pids]
    for pid in pids:
        cuda.lock(pid, timeout_ms=LOCK_MS)
    out = timed(lambda: [cuda.checkpoint(*pids) for pids in calls])
    back = timed(lambda: [cuda.restore(*pids) for pids in calls])
    for pid in pids:
        cuda.unlock(pid)
    return {"checkpoint_s": out, "restore_s": back}


def imaged(run: Programs, product: Product, machine: Machine, mib: int, directory: Path) -> dict[str, Any]:
    """Measure a suspension with CRIU and an image on disk; return the reason if it is not possible."""
    why = tree.can()
    if machine.criu is None or why is not None:
        return {"bytes": mib * MIB, "why_not": why or (machine.no_criu.why if machine.no_criu else "no criu")}
    with tempfile.TemporaryDirectory(prefix="images-", dir=directory) as top:
        if (why := tree.trial(Criu(program=machine.criu), Path(top))) is not None:
            return {"bytes": mib * MIB, "why_not": why}
        store = DirectoryStore(Path(top) / "store", os.urandom(32))
        try:
            if (mib * 1.1 + machine.besides_mib) * MIB > store.usage().free:
                return {"bytes": mib * MIB, "why_not": f"{mib / 1024:g} GiB do not fit on the disk of {directory}"}
            where = {"directory": str(directory), "file_system": file_system(directory)}
            return {**where, **_imaged(run, product, Criu(program=machine.criu), store, mib)}
        finally:
            store.close()


def _imaged(run: Programs, product: Product, criu: Criu, store: DirectoryStore, mib: int) -> dict[str, Any]:
    product.needs = {product.nvml.devices()[0].uuid: mib * MIB}
    with tree.directory() as place:
        return _imaged_in(place, run, product, criu, store, mib)


def _imaged_in(  # noqa: PLR0917 - as above
    place: Path, run: Programs, product: Product, criu: Criu, store: DirectoryStore, mib: int
) -> dict[str, Any]:
    work, program, key = Path(run.top), Program(place), JobKey("bench", 1, 1)
    seconds: dict[str, float] = {}
    command = (sys.executable, str(HERE / "worker.py"), str(place))
    with tree.space(work, *command, owner=tree.OWNER) as first, looked_after(product.cuda, program):
        program.ready()
        root_ns, program.pid = first.root()
        program.ask("setup", mib=mib, seed=1, graph=False)
        for name in ("lock", "checkpoint"):
            seconds[name] = timed(product.phases(program.pid)[name])
        began = time.monotonic()
        with store.begin(key, uid=tree.OWNER.uid, estimate=mib * MIB) as writer:
            writer.follow()
            tree.dump(criu, first, writer.criu_fd, timeout_s=480)
            image = writer.commit(tree.manifest(key, root_ns, mib))
        seconds["dump"] = time.monotonic() - began
    with tree.space(work, owner=tree.OWNER) as second, looked_after(product.cuda, program):
        again = store.find(LiveRun(replace(key, submit_epoch=2), tree.OWNER.uid, 1))
        assert again is not None
        seconds["verify"] = timed(lambda: store.verify(again))
        fd = store.open_criu(again)
        with store.verifying(again) as pages:
            seconds["restore image"] = timed(
                lambda: criu.restore(
                    Process(second.init).id, fd, [], root_pid_ns=root_ns, timeout_s=480, pages=pages, user=tree.OWNER
                )
            )
        os.close(fd)
        program.pid = second.members()[root_ns]
        for name in ("restore", "unlock"):
            seconds[name] = timed(product.phases(program.pid)[name])
        program.ask("steps", count=1)
        end(product.cuda, program)
    return {"bytes": mib * MIB, "image_bytes": image.manifest.size, "seconds": seconds}
