"""Readers of ``/proc`` and of cgroup files: the user chooses names, arguments, environments, paths and descriptors.

Each input is a process, written as the kernel writes it, and damage to some of its files. For an undamaged process the
readers must return the true values; for a damaged one, unknown or any value of the right type.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutation
from fuzz.mutation import some
from fuzz.places import directory, put
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.agent import orphans
from slurm_affinode.base import pidfd
from slurm_affinode.checkpoint import inspection
from slurm_affinode.checkpoint.criu import criu, restore_gate
from slurm_affinode.checkpoint.cuda import client as cuda
from slurm_affinode.checkpoint.files import deleted_files, device_files, local_files, open_files
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.suspension.inplace import file_locks, sock_diag, sockets
from slurm_affinode.suspension.inplace.freezer import LinuxFreezer
from slurm_affinode.suspension.job import cgroup
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.peers import Inspector
from slurm_affinode.suspension.job.process_tree import (
    LinuxProcesses,
    Member,
    pending_signals,
    thread_state,
    thread_states,
)

PID, PARENT = 300, 200
_STATES = "RSDTtZX"
_MISSING = "\0missing"
"""In place of a file's text: the file does not exist."""


def _escaped(name: str) -> str:
    """Return a process's name as in ``status`` and ``stat``: the kernel escapes these two characters and no other."""
    return name.replace("\\", "\\\\").replace("\n", "\\n")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _process(rng: Random) -> dict[str, Any]:
    """Return a random valid process."""
    state = some(rng, _STATES)
    return {
        "comm": os.fsdecode(mutation.name(rng)),
        "state": state,
        "parent": some(rng, (0, 1, PARENT, 4194304)),
        "started": some(rng, (0, 12345, 2**40)),
        "ns_pids": some(rng, ([PID], [PID, 1], [PID, 17, 1])),
        "uids": some(rng, ([0, 0, 0, 0], [2001] * 4, [2001, 0, 0, 2001])),
        "threads": some(rng, (1, 2)),
        "groups": some(rng, ([], [100], [100, 2001])),
        "memory": state not in "ZX",
        "argv": [mutation.text(rng, 20) for _ in range(int(rng.random() * 3))],
        "env": [
            some(rng, ("SLURM_JOB_ID=", "CUDA_MPS_PIPE_DIRECTORY=", "A", "")) + mutation.text(rng)
            for _ in range(int(rng.random() * 4))
        ],
    }


def _texts(process: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of a process, as kernel 6.1 writes them. Source: fs/proc/array.c, fs/proc/task_mmu.c."""
    name = _escaped(process["comm"])
    times = f"0 0 0 -1 4194560 0 0 0 0 7 5 3 2 20 0 {process['threads']} 0 {process['started']} 1000 200"
    ids = "\t".join(map(str, process["uids"]))
    status = (
        f"Name:\t{name}\nUmask:\t0022\nState:\t{process['state']} (x)\nTgid:\t{PID}\nNgid:\t0\nPid:\t{PID}\n"
        f"PPid:\t{process['parent']}\nTracerPid:\t0\nUid:\t{ids}\nGid:\t{ids}\nFDSize:\t64\n"
        f"Groups:\t{' '.join(map(str, process['groups']))} \nNStgid:\t{PID}\n"
        f"NSpid:\t{chr(9).join(map(str, process['ns_pids']))}\n"
    )
    if process["memory"]:
        status += "VmPeak:\t 900 kB\nVmHWM:\t 800 kB\nVmRSS:\t 700 kB\nRssAnon:\t 50 kB\nRssFile:\t 1 kB\n"
        status += "RssShmem:\t 2 kB\nVmSwap:\t 3 kB\n"
    status += f"Threads:\t{process['threads']}\nSigQ:\t0/1\n"
    status += "SigPnd:\t0000000000000200\nShdPnd:\t0000000000004000\nSigBlk:\t0000000000000000\n"
    return {
        "stat": _bytes(f"{PID} ({name}) {process['state']} {process['parent']} {times} 0 0 0\n"),
        "status": _bytes(status),
        "cmdline": b"".join(_bytes(word) + b"\0" for word in process["argv"]),
        "environ": b"".join(_bytes(word) + b"\0" for word in process["env"]),
        "io": b"rchar: 10\nwchar: 20\nsyscr: 1\nsyscw: 2\nread_bytes: 30\nwrite_bytes: 40\ncancelled_write_bytes: 0\n",
        "comm": _bytes(process["comm"]) + b"\n",
        "syscall": b"0 0x0 0x1 0x2 0x3 0x4 0x5 0x7ffd 0x7fee\n" if process["state"] == "S" else b"running\n",
        "children": b"301 302 ",
        "smaps_rollup": b""
        if not process["memory"]
        else b"00-01 ---p 00:00 0 [rollup]\nPss_Anon: 40 kB\nPss_Shmem: 2 kB\nSwapPss: 1 kB\n",
    }


def _damaged(rng: Random, files: dict[str, bytes], share: float) -> dict[str, str]:
    """Return the damaged ones among ``files``, as text with one character per byte."""
    result = {}
    if rng.random() < share:
        for name, whole in files.items():
            if rng.random() < 0.3:
                data = mutation.mutated(rng, whole, (b"Uid:", b"NSpid:\t", b"VmRSS:", b"kB", b"\n\n", b") "))
                result[name] = _MISSING if rng.random() < 0.1 else data.decode("latin-1")
    return result


def _process_input(rng: Random) -> bytes:
    process = _process(rng)
    return json.dumps([process, _damaged(rng, _texts(process), 0.5)]).encode()


class _Proc:
    """A fake ``/proc`` with one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = f"{root}/{PID}"
        for item in (
            f"{PID}/task/{PID}",
            f"{PID}/fd",
            f"{PID}/fdinfo",
            f"{PID}/map_files",
            f"{PID}/net",
            f"{PID}/ns",
            "self/ns",
            f"{PARENT}",
            "sysvipc",
            "net",
        ):
            (root / item).mkdir(parents=True, exist_ok=True)
        put(f"{root}/stat", b"cpu 0\nbtime 1700000000\n")
        for kind in ("mnt", "pid", "net", "ipc", "user", "uts", "cgroup"):
            os.symlink(f"{kind}:[4026531840]", f"{self.base}/ns/{kind}")
            os.symlink(f"{kind}:[4026531840]", f"{root}/self/ns/{kind}")

    def write(self, files: dict[str, bytes], damage: dict[str, str]) -> None:
        """Write the files of the process."""
        for name, data in files.items():
            path = (
                f"{self.base}/task/{PID}/{name}" if name in ("comm", "syscall", "children") else f"{self.base}/{name}"
            )
            changed = damage.get(name)
            if changed == _MISSING:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            else:
                put(path, data if changed is None else changed.encode("latin-1"))
                if name == "stat":
                    put(f"{self.base}/task/{PID}/stat", data)


def _expect(what: str, actual: object, true: object) -> None:
    if actual != true:
        raise Wrong(f"{what}: {actual!r:.200} in place of {true!r:.200}")


@contextlib.contextmanager
def _processes() -> Iterator[Check]:
    with directory() as root:
        proc = _Proc(root)
        tree, inspector = LinuxProcesses(root), Inspector(root)

        def check(data: bytes) -> bool:
            item, damage = json.loads(data)
            files = _texts(item)
            proc.write(files, damage)
            finder = JobFinder(root, cgroups=root / "cgroup")
            read = {
                "started": inspector.started(PID),
                "cpu": inspector.cpu_ticks(PID),
                "io": inspector.io_bytes(PID),
                "children": sorted(inspector._children(PID)),
                "member": tree.read(PID),
                "facts": next(iter(inspection.collect(PID, PID, proc=root).processes), None),
                "host": cuda.host_bytes(PID, root),
                "waits": sockets.waits((PID,), root),
                "uses": orphans.uses(finder, proc=root, cgroups=root / "cgroup"),
                "job": finder.find(PID),
                **_of_held(root),
            }
            _sound(read)
            if not damage:
                _true(item, read)
            return read["member"] is not None

        yield check


def _of_held(root: Path) -> dict[str, Any]:
    """Return the values read through a handle of the process."""
    with pidfd.Process(PID, proc=root) as process:
        read: dict[str, Any] = {"status": {}, "held": None, "command": orphans._command(process), "credentials": None}
        read |= {
            "mask": pending_signals(process),
            "state": thread_state(process),
            "states": thread_states(process),
        }
        with contextlib.suppress(OSError):
            read["status"] = process.status()
        with contextlib.suppress(OSError):
            read["held"] = process.stat()
        with contextlib.suppress(OSError, ValueError, KeyError):
            read["credentials"] = restore_gate.of_process(process)
        with contextlib.suppress(OSError):
            inspection._sysv(process, process, root)
        return read


def _sound(read: dict[str, Any]) -> None:
    """Check properties that hold for any input."""
    member: Member | None = read["member"]
    if member is not None and not (isinstance(member.pid_ns, int) and len(member.state) >= 1):
        raise Wrong(f"{member}")
    if not read["command"].isprintable():
        raise Wrong(f"a command that cannot be shown: {read['command']!r}")
    job = read["job"]
    if job is not None and not (0 < job.job_id < 10**10 and (job.step is None or job.step.isprintable())):
        raise Wrong(f"{job}")


def _true(process: dict[str, Any], read: dict[str, Any]) -> None:
    """Check that the values of an undamaged process are true."""
    state = process["state"]
    _expect("start", read["started"], process["started"])
    _expect("CPU time", read["cpu"], 7 + 5 + 3 + 2)
    _expect("bytes", read["io"], (70, 30))
    _expect("children", read["children"], [301, 302])
    member = read["member"]
    of_thread = state == "Z" and process["threads"] > 1
    _expect(
        "member",
        (member.pid_ns, member.parent, member.started, member.uid),
        (process["ns_pids"][-1], process["parent"], process["started"], process["uids"][1]),
    )
    if not of_thread:
        _expect("state", member.state, state)
    _expect("state of the freezer", read["state"], state)
    _expect("states", read["states"], {state})
    _expect("signals", read["mask"], 0x4200)
    status, held = read["status"], read["held"]
    _expect("held", (held.state, held.parent, held.started), (state, process["parent"], process["started"]))
    for name, value in (("Uid", process["uids"]), ("PPid", [process["parent"]]), ("NSpid", process["ns_pids"])):
        _expect(name, status[name].split(), list(map(str, value)))
    fact = read["facts"]
    _expect("uids", fact.uids, tuple(process["uids"]))
    _expect("state of the facts", fact.state, state)
    _expect("memory", fact.memory, 43 * 1024 if process["memory"] else 0)
    _expect("tracer", fact.tracer, 0)
    _expect("memory to come back", read["host"] is not None, process["memory"])
    variables = {word.partition("=")[0]: word.partition("=")[2] for word in process["env"] if "=" in word}
    named = variables.get("SLURM_JOB_ID", "")
    job = read["job"]
    if job is not None and job.source == "environment":
        _expect("job", str(job.job_id), named)


# --- mappings


_TENSOR_AT = 0x1800
"""Address of the name of a tensor."""


def _map_input(rng: Random) -> bytes:
    """Return mappings: begin, end, mode, inode and path of each."""
    rows, at = [], 0x1000
    for _ in range(1 + int(rng.random() * 4)):
        pages = 1 + int(rng.random() * 4)
        path = some(
            rng, ("", "[heap]", "/dev/nvidia0", "/home/a/x", f"/tmp/{mutation.text(rng, 12)}", "/" + _forged(rng))
        )
        rows.append([at, at + pages * 0x1000, some(rng, ("r--p", "rw-s", "r-xp", "rw-p")), int(rng.random() * 3), path])
        at += pages * 0x2000
    maps = _maps(rows)
    damaged = mutation.mutated(rng, maps, (b"\r", b"-", b"r--p 00000000 00:01 1 /x")) if rng.random() < 0.3 else None
    return json.dumps([rows, None if damaged is None else damaged.decode("latin-1")]).encode()


def _forged(rng: Random) -> str:
    """Return a path with text that looks like a separate line."""
    end = some(rng, mutation.LINE_ENDS)
    addresses = some(rng, ("1000-2000", "0-1", "zz-1", ""))
    path = some(rng, ("/y", "/dev/nvidia0", ""))
    return f"tmp/x{end}{addresses} r--p 00000000 00:01 {int(rng.random() * 3)} {path}"


def _maps(rows: list[Any]) -> bytes:
    lines = (
        f"{begin:08x}-{end:08x} {mode} 00000000 00:01 {inode}".ljust(72) + (f" {_in_path(path)}" if path else "") + "\n"
        for begin, end, mode, inode, path in rows
    )
    return _bytes("".join(lines))


def _in_path(path: str) -> str:
    return path.replace("\n", "\\012")


@contextlib.contextmanager
def _mappings() -> Iterator[Check]:
    with directory() as root:
        proc = _Proc(root)
        place = root / str(PID) / "map_files"
        made: list[str] = []
        tensor = b"/torch_1_2_3\0"
        put(f"{proc.base}/mem", bytes(_TENSOR_AT) + tensor + bytes(0x100000))

        def check(data: bytes) -> bool:
            rows, damage = json.loads(data)
            put(f"{proc.base}/maps", _maps(rows) if damage is None else damage.encode("latin-1"))
            for link in made:
                os.unlink(link)
            made.clear()
            for begin, end, _, _, path in rows:
                if path.startswith("/"):
                    made.append(f"{place}/{begin:x}-{end:x}")
                    os.symlink("/dev/null", made[-1])
            with pidfd.Process(PID, proc=root) as process:
                devices = inspection._mapped_devices(process)
                try:
                    mapped = {item.begin for item in device_files._mappings(process)}
                except OSError:
                    mapped = set()
                try:
                    names = local_files._names_in_memory(process, lambda: None)
                except OSError:  # damaged: too much memory
                    names = []
            if damage is not None:
                with contextlib.suppress(OSError):
                    list(_opened(root))
                return False
            result = {text for text in _opened(root) if text.startswith("map_files/")}
            expected = {
                (inode, _how(mode)): f"map_files/{begin:x}-{end:x}"
                for begin, end, mode, inode, path in reversed(rows)
                if path.startswith("/")
            }
            _expect("files", result, set(expected.values()))
            heaps = (
                range(begin, end)
                for begin, end, mode, inode, path in rows
                if mode == "rw-p" and inode == 0 and path in ("", "[heap]")
            )
            in_heap = any(_TENSOR_AT in item and _TENSOR_AT + len(tensor) - 1 in item for item in heaps)
            _expect("tensors", names, ["torch_1_2_3"] if in_heap else [])
            _expect("devices", "/dev/nvidia0" in devices, any(path == "/dev/nvidia0" for *_, path in rows))
            _expect("mappings", mapped, {begin for begin, *_, path in rows if path == "/dev/nvidia0"})
            return True

        most, local_files._MOST_MEMORY = local_files._MOST_MEMORY, 1 << 20  # an area of it may have to be read
        try:
            yield check
        finally:
            local_files._MOST_MEMORY = most


def _opened(root: Path) -> list[str]:
    """Return the open files of a process as found after a restore."""
    with pidfd.Process(PID, proc=root) as process:
        return [file.name for file in open_files._files(process)]


def _how(mode: str) -> str:
    return "private" if mode.endswith("p") else "shared"


# --- descriptors


_TARGETS = (
    "/dev/nvidia0",
    "/home/a/file",
    "/tmp/f (deleted)",
    "pipe:[123]",
    "socket:[77]",
    "socket:[78]",
    "anon_inode:[eventfd]",
    "anon_inode:[eventpoll]",
    "/memfd:x (deleted)",
    "/tmp/.nfs0001",
    "net:[4026531840]",
    "/socket:[9]",
    "socket:[",
    "socket:[x]",
)


def _descriptor_input(rng: Random) -> bytes:
    links = []
    for _ in range(int(rng.random() * 5)):
        target = some(rng, _TARGETS) if rng.random() < 0.7 else "/tmp/" + mutation.text(rng, 12)
        flags = some(rng, ("0100000", "0100001", "0100002", "02", "010000000"))
        info = f"pos:\t0\nflags:\t{flags}\nmnt_id:\t15\nino:\t{int(rng.random() * 99)}\n"
        if "eventfd" in target:
            info += f"eventfd-count: 0\neventfd-id: 3\neventfd-semaphore: {some(rng, '01')}\n"
        if rng.random() < 0.3:
            info += (
                f"lock:\t1: {some(rng, ('FLOCK', 'POSIX'))}  ADVISORY  WRITE {some(rng, (PID, 0, -1))} 00:2f:7 0 EOF\n"
            )
        if rng.random() < 0.1:
            info = mutation.mutated(rng, info.encode(), (b"flags:", b"\r")).decode("latin-1")
        links.append([target, info])
    rows = [
        f"0000000000000000: 00000002 00000000 00010000 0001 01 {some(rng, (77, 78, 5))} /tmp/{mutation.text(rng, 12)}"
        for _ in range(2)
    ]
    unix = "Num       RefCount Protocol Flags    Type St Inode Path\n" + "\n".join(rows) + "\n"
    tcp = "  sl  local_address\n   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000"
    tcp += "  2001 0 77 1\n"
    if rng.random() < 0.2:
        tcp = mutation.mutated(rng, tcp.encode()).decode("latin-1")
    return json.dumps([links, os.fsdecode(_bytes(unix)), tcp]).encode()


@contextlib.contextmanager
def _descriptors() -> Iterator[Check]:
    with directory() as root:
        proc = _Proc(root)
        (root / str(PID) / "root").symlink_to(root)
        (root / str(PID) / "cwd").symlink_to("/tmp")
        put(f"{proc.base}/stat", f"{PID} (x) S 1 {' '.join('0' * 40)}\n".encode())
        put(f"{proc.base}/status", b"Name:\tx\nNSpid:\t300\t1\nPPid:\t0\n")
        (root / "sys/kernel/random").mkdir(parents=True)
        put(f"{root}/sys/kernel/random/boot_id", b"aaaaaaaa-bbbb")
        held = 0

        def check(data: bytes) -> bool:
            nonlocal held
            links, unix, tcp = json.loads(data)
            for number in range(held):
                os.unlink(f"{proc.base}/fd/{number}")
            held = len(links)
            for number, (target, info) in enumerate(links):
                os.symlink(_bytes(target.replace("\0", "")) or b"x", f"{proc.base}/fd/{number}".encode())
                put(f"{proc.base}/fdinfo/{number}", _bytes(info))
            put(f"{proc.base}/net/unix", _bytes(unix))
            put(f"{proc.base}/net/tcp", _bytes(tcp))
            put(f"{root}/locks", b"".join(b"1: -> " + _bytes(info) + b"\n" for _, info in links) + _bytes(unix))
            locks = file_locks.NodeFileLocks(root)
            waiters = locks.awaited({7: locks.locks_of([PID]) | {()}}, {7: (PID,)})
            if any(pid <= 0 or pid == PID for pid in waiters.values()):
                raise Wrong(f"{waiters}")
            with pidfd.Process(PID, proc=root) as process:
                files, _, _ = inspection._files(process)
                socket_inodes = sock_diag.socket_inodes(process)
            with contextlib.suppress(OSError):
                list(_opened(root))
            true = {int(target[8:-1]) for target, _ in links if re.fullmatch(r"socket:\[[0-9]+\]", target)}
            _expect("sockets", socket_inodes, frozenset(true))
            with pidfd.Process(PID, proc=root) as process:
                list(deleted_files._nameless_of(process))
                list(local_files._open_files([process], local_files.PLACES, lambda: None))
                sockets = local_files._sockets([process], local_files.PLACES)
            if not all(path.startswith("/tmp/") for path in sockets):
                raise Wrong(f"{sockets}")
            process_facts = inspection.ProcessFacts(PID, "x", (2001,), files=files)
            with pidfd.Process(PID, proc=root) as process:
                if inspection._has_inet((process_facts,), process) and not true:
                    raise Wrong("it has a socket of the internet")
            return bool(files)

        def _no_maps() -> None:
            put(f"{proc.base}/maps", b"")

        _no_maps()
        yield check


# --- cgroups


def _cgroup_input(rng: Random) -> bytes:
    job = some(rng, (7, 123, 4294967295))
    path = some(
        rng,
        (
            f"/system.slice/slurmstepd.scope/job_{job}/step_batch",
            f"/slurm/uid_2001/job_{job}/step_0",
            f"/system.slice/c1_slurmstepd.scope/job_{job}/step_batch/user/task_0",
            f"/user.slice/user@2001.service/slurm/job_{job}",
            "/",
            "/user.slice",
            "/system.slice/slurmstepd.scope/sABCDEFGHIJKLM/step_0",
        ),
    )
    name = mutation.text(rng, 12).replace("\n", "").replace("/", "")
    forged = some(rng, ("", "", f"/{name}" if name else "", "/../.."))
    if "/job_" in path:  # only root creates cgroups there; cgroups of users belong to no job, whatever their names
        forged = some(rng, (forged, f"/x{some(rng, mutation.LINE_ENDS[1:])}0::/slurm/job_99"))
    rows = [["", path + forged]]
    if rng.random() < 0.4:
        rows += [["freezer", path + forged], ["memory", path], ["name=systemd", "/"]]
    text = "".join(f"{9 - number}:{controllers}:{where}\n" for number, (controllers, where) in enumerate(rows))
    damaged = (
        mutation.mutated(rng, _bytes(text), (b"0::/slurm/job_99", b"::", b"/..", b"freezer"))
        if rng.random() < 0.3
        else None
    )
    knobs = {
        name: mutation.mutated(rng, seed).decode("latin-1")
        for name, seed in (
            ("memory.max", some(rng, (b"max\n", b"1048576\n"))),
            ("memory.current", b"4096\n"),
            ("memory.stat", b"anon 1\ninactive_file 4096\n"),
            ("cpu.stat", b"usage_usec 1000\nuser_usec 1\n"),
            ("memory.peak", b"8192\n"),
            ("cgroup.procs", b"300\n301\n"),
            ("cgroup.events", b"populated 1\nfrozen 0\n"),
        )
    }
    return json.dumps([job, rows, None if damaged is None else damaged.decode("latin-1"), knobs]).encode()


@contextlib.contextmanager
def _cgroups() -> Iterator[Check]:
    with directory() as root:
        proc = _Proc(root)
        cgroups = root / "cgroups"
        (cgroups / "slurm/job_99").mkdir(parents=True)
        put(f"{root}/self/cgroup", b"0::/system.slice\n")
        put(f"{root}/meminfo", b"MemTotal: 100 kB\nMemAvailable: 50 kB\n")
        put(f"{proc.base}/stat", _texts(_process(Random(1)) | {"comm": "x"})["stat"])  # noqa: S311
        put(f"{proc.base}/status", b"Name:\tx\nVmHWM:\t 5 kB\n")
        put(f"{proc.base}/cmdline", b"x\0")
        put(f"{proc.base}/environ", b"")
        step_cgroup = cgroups / "slurm/uid_2001/job_7/step_0"
        step_cgroup.mkdir(parents=True)
        file_systems = cgroup._FILE_SYSTEMS
        cgroup._FILE_SYSTEMS = {_file_system(step_cgroup)}

        def check(data: bytes) -> bool:
            job, rows, damage, knobs = json.loads(data)
            text = "".join(f"{9 - number}:{controllers}:{where}\n" for number, (controllers, where) in enumerate(rows))
            put(f"{proc.base}/cgroup", _bytes(text) if damage is None else damage.encode("latin-1"))
            for name, knob in knobs.items():
                put(f"{step_cgroup}/{name}", knob.encode("latin-1"))
            finder = JobFinder(root, cgroups=cgroups)
            ref = finder.find(PID)
            files = criu.cgroup_files(PID, cgroups, proc=root, also_own=True)
            knobs_of = [Path(str(group)) for group in LinuxFreezer(root, cgroups)._cgroups_of((PID,))]
            for path in (*files, *knobs_of):
                if ".." in path.parts or not path.is_relative_to(cgroups):
                    raise Wrong(f"outside of the cgroups: {path}")
            memory = inspection.memory_facts(PID, proc=root, cgroups=cgroups)
            if memory.available != 50 * 1024 or not isinstance(memory.headroom, int | None):
                raise Wrong(f"{memory}")
            uses = orphans.uses(finder, proc=root, cgroups=cgroups)
            LinuxFreezer(root, cgroups).mechanism((_member(),), 1)
            room = MemoryLimits(root / "records", proc=root, cgroups=cgroups).room(
                job, pidfd.Id(PID, finder.started(PID) or 0)
            )
            if room is not None and (ref is None or ref.job_id != job or ref.source != "cgroup"):
                raise Wrong(f"limits of another job: {room}")
            if damage is None:
                if ref is not None and ref.source == "cgroup":
                    _expect("job", ref.job_id, job)
                    _expect("jobs that use the node", set(uses), {job})
                if any("slurm/job_99" in str(path) and f"job_{job}" not in str(path) for path in files):
                    raise Wrong(f"a forged line counts: {files}")
                if any("slurm/job_99" in str(path) and f"job_{job}" not in str(path) for path in knobs_of):
                    raise Wrong(f"a forged line counts: {knobs_of}")
            return ref is not None

        try:
            yield check
        finally:
            cgroup._FILE_SYSTEMS = file_systems


def _file_system(place: Path) -> int:
    fd = os.open(place, os.O_RDONLY)
    try:
        return cgroup.file_system(fd)
    finally:
        os.close(fd)


def _member() -> Member:
    return Member(PID, 17, 1, 5, "S", "x", 2001)


def _made(generate: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    return generate


TARGETS = (
    Target(
        "proc-process",
        "stat, status, cmdline, environ, io, comm, syscall, children, smaps_rollup",
        _process_input,
        _processes,
    ),
    Target("proc-maps", "maps and map_files", _map_input, _mappings),
    Target("proc-descriptors", "fd, fdinfo, net/unix, net/tcp, locks", _descriptor_input, _descriptors),
    Target("proc-cgroup", "cgroup, and the files of cgroups", _cgroup_input, _cgroups),
)
