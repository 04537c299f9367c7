#!/usr/bin/python3
"""Print every attribute of the batch script's process and of its surroundings as one JSON object.

A batch script for nodes of the test cluster. Values that identify the job, its user's session or a moment are replaced
by their kind, so that two jobs have the same values unless they run in a different way.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
PRCTL = {
    "parent_death_signal": 2, "dumpable": 3, "keep_capabilities": 7, "secure_bits": 27, "timer_slack_ns": 30,
    "child_subreaper": 37, "no_new_privileges": 39, "transparent_huge_pages_disabled": 42, "machine_check_kill": 34,
    "time_stamp_counter": 25, "io_flusher": 58,
}  # fmt: skip
BY_POINTER = ("parent_death_signal", "child_subreaper", "time_stamp_counter")
KEYCTL, PERSONALITY, IOPRIO_GET, PIDFD_OPEN, PTRACE_SEIZE = 250, 135, 252, 434, 0x4206
PERSONALITY_QUERY = 0xFFFFFFFF
STATUS = (
    "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "CapInh", "CapPrm", "CapEff",
    "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass",
    "SpeculationIndirectBranch",
    "Cpus_allowed", "Mems_allowed", "TracerPid", "Threads", "THP_enabled", "untag_mask", "CoreDumping",
)  # fmt: skip
FILES = (
    "oom_score_adj", "loginuid", "sessionid", "coredump_filter", "timerslack_ns", "uid_map", "gid_map", "setgroups",
    "timens_offsets", "attr/current", "personality", "projid_map",
)  # fmt: skip
SYSTEM = ("kernel/core_pattern", "kernel/pid_max", "kernel/hostname", "kernel/yama/ptrace_scope", "fs/file-max")
# Variables whose values belong to one job: IDs, times, processes, the option's own file names.
JOB_VARIABLES = {
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_TASK_PID",
    "SLURM_TRES_PER_TASK", "TMPDIR", "SLURMD_DEBUG", "SLURM_TOPOLOGY_ADDR", "SLURM_JOB_SLUID", "SLURM_SLUID",
}  # fmt: skip
JOB_PARTS = re.compile(r"job_?\d+|s[0-9A-Z]{13}(?=/)|(?<=slurm-)\d+(?=\.out)")


def read(path: str) -> str:
    """Return the text of a file, or the error."""
    try:
        return Path(path).read_text(errors="backslashreplace").strip("\n\0 ")
    except OSError as error:
        return os.strerror(error.errno or 0)


def call(function: Callable[..., int], *arguments: Any) -> str:
    """Return the result of a system call, or its error."""
    value = function(*arguments)
    return str(value) if value >= 0 else os.strerror(ctypes.get_errno())


def fields(text: str) -> dict[str, str]:
    """Return the lines ``Name: value``."""
    rows = (line.partition(":") for line in text.splitlines())
    return {name: " ".join(value.split()) for name, _, value in rows}


def limits() -> dict[str, str]:
    """Return the soft and hard limits of resources."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {name.lower(): "{} {}".format(*resource.getrlimit(getattr(resource, name))) for name in names}


def prctl() -> dict[str, str]:
    """Return the attributes that prctl(2) reads."""
    outcome = {}
    for name, option in PRCTL.items():
        value = ctypes.c_int(-1)
        pointer = name in BY_POINTER
        result = call(LIBC.prctl, option, ctypes.byref(value) if pointer else 0, 0, 0, 0)
        outcome[name] = str(value.value) if pointer and result == "0" else result
    return outcome


def keyring(which: int) -> str:
    """Return type, owner, permissions and name of a keyring, without creating it."""
    serial = LIBC.syscall(KEYCTL, 0, which, 0)
    if serial < 0:
        return os.strerror(ctypes.get_errno())
    buffer = ctypes.create_string_buffer(256)
    LIBC.syscall(KEYCTL, 6, serial, buffer, 256)
    return buffer.value.decode()


def scheduling() -> dict[str, str]:
    """Return policy, priorities and CPUs."""
    return {
        "scheduling_policy": str(os.sched_getscheduler(0)),
        "scheduling_priority": str(os.sched_getparam(0).sched_priority),
        "nice": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "affinity": str(sorted(os.sched_getaffinity(0))),
        "io_priority": call(LIBC.syscall, IOPRIO_GET, 1, 0),
        "autogroup_nice": read("/proc/self/autogroup").rpartition(" ")[2],
    }


def relations() -> dict[str, str]:
    """Return the relations to other processes."""
    parent, terminal = os.getppid(), int(read("/proc/self/stat").rpartition(") ")[2].split()[4])
    return {
        "parent": fields(read(f"/proc/{parent}/status")).get("Name", "unknown"),
        "parent_user": "root" if fields(read(f"/proc/{parent}/status"))["Uid"].split()[0] == "0" else "the user",
        "pid_1": "the parent" if parent == 1 else "the node's",
        "group_leader": str(os.getpgid(0) == os.getpid()),
        "session_leader": str(os.getsid(0) == os.getpid()),
        "terminal": str(terminal),
        "task_pid_variable": str(os.environ.get("SLURM_TASK_PID") == str(os.getpid())),
        "visible_processes": "all" if "slurmd" in map(name_of, processes()) else "those of the job",
        "pid_levels": str(len(fields(read("/proc/self/status"))["NSpid"].split())),
        "command_line": JOB_PARTS.sub("N", read("/proc/self/cmdline").replace("\0", " ")),
        "working_directory": str(Path.cwd()),
        "root": str(Path("/proc/self/root").readlink()),
        "start_of_clock": str(abs(process_start_s() - float(read("/proc/uptime").split()[0])) < 60),
    }


def name_of(pid: str) -> str:
    """Return the name of a process, empty if it has ended."""
    return fields(read(f"/proc/{pid}/status")).get("Name", "")


def processes() -> list[str]:
    """Return the PIDs in ``/proc``."""
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]


def process_start_s() -> float:
    """Return the start time of this process in seconds after boot."""
    return int(read("/proc/self/stat").rpartition(") ")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def descriptors() -> dict[str, str]:
    """Return kind, flags and name of each open descriptor."""
    result = {}
    for fd in (fd for fd in range(256) if Path(f"/proc/self/fd/{fd}").exists()):
        facts, name = os.fstat(fd), str(Path(f"/proc/self/fd/{fd}").readlink())
        flags = fields(read(f"/proc/self/fdinfo/{fd}"))["flags"]
        kind = "terminal" if os.isatty(fd) else stat.filemode(facts.st_mode)
        result[f"descriptor_{fd}"] = f"{kind} {flags} {JOB_PARTS.sub('N', name)}"
    return result


def namespaces(host: str) -> dict[str, str]:
    """Return which namespaces are those of the node: ``host`` names them, as in ``/proc/PID/ns``."""
    known = dict(word.split("=", 1) for word in host.split())
    return {
        f"namespace_{name}": "the node's" if str(Path(f"/proc/self/ns/{name}").readlink()) == link else "the job's"
        for name, link in sorted(known.items())
        if Path(f"/proc/self/ns/{name}").exists()
    }


def mounts() -> dict[str, str]:
    """Return the mounts: root in the file system, options, propagation and type of each."""
    result: dict[str, list[str]] = {}
    for line in read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        _, _, _, root, place, options, *tags = left.split(" ")
        shared = "+".join(sorted(tag.partition(":")[0] for tag in tags)) or "private"
        result.setdefault(place, []).append(f"{root} {options} {shared} {right}")
    # A mount above another one of the same type and options, such as a job's own /proc, counts as a further one.
    return {f"mount_{place}": "; ".join(rows) for place, rows in result.items()}


def tracing() -> dict[str, str]:
    """Return whether a child and the parent can be traced, and which facts of PID 1 can be read."""
    child = subprocess.Popen(["sleep", "100"])
    try:
        traced = call(LIBC.ptrace, PTRACE_SEIZE, child.pid, 0, 0)
        memory = "readable" if os.access(f"/proc/{child.pid}/mem", os.R_OK) else "denied"
    finally:
        child.kill()
        child.wait()
    return {
        "trace_child": traced,
        "child_memory": memory,
        "trace_parent": call(LIBC.ptrace, PTRACE_SEIZE, os.getppid(), 0, 0),
        "parent_environment": "readable" if os.access(f"/proc/{os.getppid()}/environ", os.R_OK) else "denied",
        "signal_parent": call(LIBC.kill, os.getppid(), 0),
        "next_pid": written("/proc/sys/kernel/ns_last_pid"),
        "settings_of_kernel": written("/proc/sys/kernel/core_pattern"),
    }


def written(path: str) -> str:
    """Return whether a file of the kernel can be changed; if so, its value stays the same."""
    try:
        Path(path).write_text(read(path))
    except OSError:
        return "denied"
    return "changed"


def core_dump() -> dict[str, str]:
    """Return how a child ends that dumps core, and the PID in the name of its file."""
    with tempfile.TemporaryDirectory() as place:
        unlimited = "resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))"
        code = f"import os, resource; {unlimited}; print(os.getpid(), flush=True); os.abort()"
        child = subprocess.Popen([sys.executable, "-c", code], cwd=place, stdout=subprocess.PIPE)
        printed = child.communicate()[0].decode().strip()
        names = [name.replace(printed, "PID") for name in os.listdir(place)]  # noqa: PTH208
    return {"core_status": str(child.returncode), "core_file": " ".join(sorted(names)) or "none"}


def credentials_seen() -> str:
    """Return the relation between the PID that a peer of a UNIX socket sees and the own PID."""
    first, other = socket.socketpair()
    pid, _, _ = struct.unpack("iII", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    first.close()
    other.close()
    return str(pid == os.getpid())


def daemon_parent() -> str:
    """Return the name of the process that a daemon has as parent."""
    code = "(sleep 0.2; awk '/^Name/ {print $2}' /proc/$(awk '/^PPid/ {print $2}' /proc/$BASHPID/status)/status) &"
    process = subprocess.run(["setsid", "-w", "bash", "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    return process.stdout.strip()


def variables() -> dict[str, str]:
    """Return the environment without the values that belong to one job."""
    return {
        f"variable_{name}": "set" if name in JOB_VARIABLES else value
        for name, value in os.environ.items()
        if name != "HOST_NAMESPACES"
    }


def main() -> None:
    """Print the attributes. The environment has the node's namespaces in ``HOST_NAMESPACES``."""
    status = fields(read("/proc/self/status"))
    result = {
        **{name: status[name] for name in STATUS if name in status},
        **{name: read(f"/proc/self/{name}") for name in FILES},
        **{name: read(f"/proc/sys/{name}") for name in SYSTEM},
        **limits(), **prctl(), **scheduling(), **relations(), **namespaces(os.environ["HOST_NAMESPACES"]),
        **descriptors(), **mounts(), **tracing(), **core_dump(), **variables(),
        "cgroup": JOB_PARTS.sub("N", read("/proc/self/cgroup")),
        "personality": call(LIBC.personality, PERSONALITY_QUERY),
        "memory_policy": fields(read("/proc/self/numa_maps").replace(" ", ":", 1)).get("", "default"),
        "peer_credentials": credentials_seen(),
        "daemon_parent": daemon_parent(),
        "host_name": socket.gethostname(),
        **{f"keyring_{name}": keyring(number) for name, number in
           {"thread": -1, "process": -2, "session": -3, "user": -4, "user_session": -5}.items()},
    }  # fmt: skip
    print(json.dumps(result))


main()
