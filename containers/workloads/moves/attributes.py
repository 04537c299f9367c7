#!/usr/bin/python3
"""Attributes of a process: numbers, limits, directories, environment, signals that are blocked, pending or ignored."""

import ctypes
import os
import resource
import signal

from moving import run, same

prctl = ctypes.CDLL(None).prctl
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.umask(0o027)
os.nice(3)
directory = os.path.join(os.path.expanduser("~"), f"directory-{os.getpid()}")
os.makedirs(directory, exist_ok=True)
os.chdir(directory)
os.environ["SET_LATER"] = "by the program"
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGRTMIN + 3})
signal.raise_signal(signal.SIGUSR1)
prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
prctl(15, b"named")


def facts():
    name = ctypes.create_string_buffer(16)
    prctl(16, name)
    reaper = ctypes.c_int()
    prctl(37, ctypes.byref(reaper))
    umask = os.umask(0o027)
    return {
        "PIDs": (os.getpid(), os.getppid(), os.getpgid(0), os.getsid(0)),
        "IDs": (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        "limits": [resource.getrlimit(getattr(resource, limit)) for limit in LIMITS],
        "umask": umask, "niceness": os.nice(0), "directory": os.getcwd(), "environment": dict(os.environ),
        "name": name.value, "reaper": reaper.value, "policy": os.sched_getscheduler(0),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()), "pending": signal.sigpending(),
        "ignored": signal.getsignal(signal.SIGUSR2), "executable": os.readlink("/proc/self/exe"),
        "dumpable": prctl(3), "timer slack": prctl(30), "keeps capabilities": prctl(7), "no new privileges": prctl(39),
    }  # fmt: skip


before = facts()


def files():
    return open("/proc/self/cmdline").read(), sorted(os.listdir("/proc/self/fd"))


files_before = files()


def check():
    for what, value in facts().items():
        same(value, before[what], what)


run(check, lambda: same(files(), files_before, "the command, or the descriptors"))
os.rmdir(directory)
