#!/usr/bin/python3 -IS
"""srun of a job with ``steps=local``: starts a step below the batch script, so that it is checkpointed with the job.

Installed as ``LIBEXECDIR/slurm-affinode-steps/srun``; the plugin prepends that directory to the job's PATH. It runs as
the user, without privileges. A step that needs more than tasks on this node is passed to Slurm's srun. One file with
few imports, as it is compiled at each start. Options, messages and environment are those of Slurm 24.11.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import os
import select
import signal
import stat
import sys
import time

# Arguments of the shepherd, see spank/shepherd_options.c.
SHEPHERD_JOB, SHEPHERD_RESTARTS, SHEPHERD_SOCKET, SHEPHERD_OPTION, SHEPHERD_END = 2, 3, 6, 7, 8
MOST_ENVIRONMENT = 1 << 20
REAL_SRUN = "SLURM_AFFINODE_SRUN"
COMM, COMM_OVERLAP = "affinode-srun", "affinode-srun+"  # how launchers find each other; the agent refuses "srun"
STEPS_PER_RESTART = 1000
TERM_S = 5.0  # from the first signal that ends the tasks to SIGKILL
MESSAGE_S = 0.1  # exits within this time are reported together
INTERRUPT_S = 1.0
BUFFER = 1 << 16
MOST_INPUT = 1 << 20
NO_ARRAY = "4294967294"
GPU_LISTS = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# What Slurm says about the allocation of an attempt, and no job sets.
FACTS = (
    "SLURMD_NODENAME", "SLURM_JOB_END_TIME", "SLURM_JOB_GPUS", "SLURM_JOB_NODELIST", "SLURM_JOB_START_TIME",
    "SLURM_NODELIST", "SLURM_RESTART_COUNT", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN",
)  # fmt: skip
CPU_COUNTS = ("cpus-per-task", "cpus-per-gpu")  # one excludes the other; an option replaces a variable
GPU_COUNTS = ("gpus", "gpus-per-node", "gpus-per-task", "gres", "tres-per-task")
FORWARDED = (signal.SIGCONT, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
WAITED = {signal.SIGCHLD, signal.SIGINT, *FORWARDED, *ENDING}

# Long options that are supported: name -> (short, argument). Argument: "" none, ":" required, "?" optional.
OPTIONS = {
    "chdir": ("D", ":"), "cpu-bind": ("", ":"), "cpus-per-gpu": ("", ":"), "cpus-per-task": ("c", ":"),
    "disable-status": ("X", ""), "error": ("e", ":"), "exact": ("", ""), "exclusive": ("", "?"), "export": ("", ":"),
    "gpu-bind": ("", ":"), "gpus": ("G", ":"), "gpus-per-node": ("", ":"), "gpus-per-task": ("", ":"),
    "gres": ("", ":"), "input": ("i", ":"), "job-name": ("J", ":"), "jobid": ("", ":"), "kill-on-bad-exit": ("K", "?"),
    "label": ("l", ""), "mpi": ("", ":"), "nodelist": ("w", ":"), "nodes": ("N", ":"), "ntasks": ("n", ":"),
    "ntasks-per-node": ("", ":"), "open-mode": ("", ":"), "output": ("o", ":"), "overcommit": ("O", ""),
    "overlap": ("", ""), "quiet": ("Q", ""), "quit-on-interrupt": ("", ""), "tres-bind": ("", ":"),
    "tres-per-task": ("", ":"), "unbuffered": ("u", ""), "wait": ("W", ":"),
    # Without effect on a step of one node, or not enforced.
    "account": ("A", ":"), "acctg-freq": ("", ":"), "comment": ("", ":"), "distribution": ("m", ":"),
    "gpu-suspend-idle": ("", "?"), "hint": ("", ":"), "mem": ("", ":"), "mem-bind": ("", ":"), "mem-per-cpu": ("", ":"),
    "mem-per-gpu": ("", ":"), "no-kill": ("k", "?"), "oom-kill-step": ("", "?"), "oversubscribe": ("s", ""),
    "partition": ("p", ":"), "profile": ("", ":"), "propagate": ("", "?"), "qos": ("q", ":"), "slurmd-debug": ("", ":"),
    "threads": ("T", ":"), "verbose": ("v", ""), "wckey": ("", ":"), "whole": ("", ""),
}  # fmt: skip
SYNONYMS = {"cpu_bind": "cpu-bind", "tasks-per-node": "ntasks-per-node"}
# The other options of srun 24.11 and 26.05: known for abbreviations, and left to it.
OTHER = """
    accel-bind async autocomplete bb bbf bcast bcast-exclude begin cluster cluster-constraint clusters compress
    consolidate-segments constraint container container-id container-type context contiguous core-spec
    cores-per-socket cpu-freq deadline debugger-test delay-boot dependency epilog exclude external-launcher extra
    extra-node-info gpu-freq gpus-per-socket gres-flags help het-group hold ignore-signals immediate interactive
    licenses mail-type mail-user mcs-label mem-update mincpus msg-timeout multi-prog network nice no-allocate nodefile
    ntasks-per-core ntasks-per-gpu ntasks-per-socket ntasks-per-tres pack-group parsable prefer preserve-env priority
    prolog pty reboot relative reservation resources resv-ports segment send-libs signal sockets-per-node spread-job
    spread-segments stepmgr switches task-epilog task-prolog test-only thread-spec threads-per-core time time-min tmp
    treewidth usage use-min-nodes version wait-for-children x11
""".split()
NAMES = sorted([*OPTIONS, *SYNONYMS, *OTHER])
SHORT = {short: name for name, (short, _) in OPTIONS.items() if short}
ANSWERED = {"help": "", "usage": "", "version": "", "h": "", "V": ""}  # answered by srun, without a step
SWITCHES = {name for name, (_, argument) in OPTIONS.items() if argument == ""}

# Variables read as options, in the order in which srun applies them.
VARIABLES = (
    ("SLURM_NNODES", "nodes"), ("SLURM_JOB_NUM_NODES", "nodes"), ("SLURM_NPROCS", "ntasks"), ("SLURM_NTASKS", "ntasks"),
    ("SLURM_CPUS_PER_TASK", "cpus-per-task"), ("SLURM_CPUS_PER_GPU", "cpus-per-gpu"),
    ("SLURM_NTASKS_PER_NODE", "ntasks-per-node"), ("SLURM_CPU_BIND", "cpu-bind"), ("SLURM_GPUS", "gpus"),
    ("SLURM_GPUS_PER_TASK", "gpus-per-task"), ("SLURM_STEP_GRES", "gres"), ("SLURM_TRES_PER_TASK", "tres-per-task"),
    ("SLURM_TRES_BIND", "tres-bind"), ("SLURM_GPU_BIND", "gpu-bind"), ("SLURM_KILL_BAD_EXIT", "kill-on-bad-exit"),
    ("SLURM_LABELIO", "label"), ("SLURM_UNBUFFEREDIO", "unbuffered"), ("SLURM_WAIT", "wait"),
    ("SLURM_STDINMODE", "input"), ("SLURM_STDOUTMODE", "output"), ("SLURM_STDERRMODE", "error"),
    ("SRUN_INPUT", "input"), ("SRUN_OUTPUT", "output"), ("SRUN_ERROR", "error"), ("SLURM_OPEN_MODE", "open-mode"),
    ("SLURM_EXPORT_ENV", "export"), ("SRUN_EXPORT_ENV", "export"), ("SLURM_WORKING_DIR", "chdir"),
    ("SLURM_REMOTE_CWD", "chdir"), ("SLURM_OVERLAP", "overlap"), ("SLURM_EXACT", "exact"),
    ("SLURM_EXCLUSIVE", "exclusive"), ("SLURM_OVERCOMMIT", "overcommit"), ("SLURM_MPI_TYPE", "mpi"),
    ("SLURM_DISABLE_STATUS", "disable-status"), ("SLURM_DISTRIBUTION", "distribution"),
)  # fmt: skip
# Variables that ask for something that only srun does.
OTHER_VARIABLES = (
    "SLURM_BCAST", "SLURM_CPU_FREQ_REQ", "SLURM_EPILOG", "SLURM_GPU_FREQ", "SLURM_HET_SIZE", "SLURM_HOSTFILE",
    "SLURM_IMMEDIATE", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_PROLOG",
    "SLURM_RESV_PORTS", "SLURM_SIGNAL", "SLURM_SRUN_MULTI", "SLURM_TASK_EPILOG", "SLURM_TASK_PROLOG",
    "SLURM_THREADS_PER_CORE", "SLURM_TIMELIMIT", "SRUN_CONTAINER", "SRUN_CONTAINER_ID",
)  # fmt: skip


class StepForSlurm(Exception):
    """The step is one for Slurm's own srun; the message says why, and is empty if no step would run."""


class Fault(Exception):
    """The step cannot be started."""


def say(text: str) -> None:
    """Write a line as srun does."""
    try:
        os.write(2, f"srun: {text}\n".encode(errors="surrogateescape"))
    except OSError:
        pass


def initial_environment() -> dict[str, str]:
    """Return the environment of this process without changes by the interpreter (it sets LC_CTYPE)."""
    with open("/proc/self/environ", "rb") as file:
        return pairs_of(file.read())


# --- Slurm's srun


def real_srun(env: dict[str, str], own_dir: str) -> tuple[str, dict[str, str]]:
    """Return the path of Slurm's srun, and the environment without this launcher. Raises ``Fault``."""
    places = [place for place in env.get("PATH", "").split(":") if os.path.realpath(place or ".") != own_dir]
    candidates = [env[REAL_SRUN]] if REAL_SRUN in env else []
    candidates += [os.path.join(place or ".", "srun") for place in places]
    for path in candidates:
        if os.access(path, os.X_OK) and os.path.isfile(path) and os.path.dirname(os.path.realpath(path)) != own_dir:
            rest = {**env, "PATH": ":".join(places)} if "PATH" in env else dict(env)
            rest.pop(REAL_SRUN, None)
            return path, rest
    raise Fault("Slurm's own srun is not in PATH")


def become_real(env: dict[str, str], own_dir: str, arguments: list[str]) -> None:
    path, rest = real_srun(env, own_dir)
    default_signals()
    os.execve(path, ["srun", *arguments], rest)


def default_signals() -> None:
    """Undo what the interpreter and a shell's ``&`` have set."""
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)


def attempt_of(env: dict[str, str]) -> tuple[int, str] | None:
    """Return the restart count of the job's current attempt, and the agent's directory.

    ``None`` unless this process is below the job's shepherd.
    """
    try:
        with open("/proc/1/cmdline", "rb") as file:
            words = os.fsdecode(file.read()).split("\0")
        if (
            words[SHEPHERD_END] == "--"
            and words[SHEPHERD_JOB] == env.get("SLURM_JOB_ID")
            and "steps=local" in words[SHEPHERD_OPTION].split(",")
        ):
            return int(words[SHEPHERD_RESTARTS]), os.path.dirname(words[SHEPHERD_SOCKET])
    except (OSError, IndexError, ValueError):
        pass
    return None


def pairs_of(environ: bytes) -> dict[str, str]:
    """Read a file such as /proc/PID/environ."""
    pairs = (word.partition(b"=") for word in environ.split(b"\0") if b"=" in word)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def current(env: dict[str, str], restarts: int, directory: str) -> dict[str, str]:
    """Return the environment with the facts of the current attempt, which the agent has written after a restore.

    A list of GPUs that the job has shortened stays.
    """
    if restarts == 0:
        return env
    import shlex  # noqa: PLC0415 - not needed in the first attempt

    try:
        with open(os.path.join(directory, "environment", env["SLURM_JOB_ID"]), "rb") as file:
            words = shlex.split(os.fsdecode(file.read(MOST_ENVIRONMENT)))
    except (OSError, ValueError):
        return env
    written = {name: value for name, _, value in (word.partition("=") for word in words if word != "export")}
    if written.get("SLURM_RESTART_COUNT") != str(restarts):
        return env
    facts = {name: written[name] for name in FACTS if name in written}
    for name in GPU_LISTS:
        if name in env and name in written and env[name].count(",") == written[name].count(","):
            facts[name] = written[name]
    return {**env, **facts}


# --- options


def long_name(prefix: str) -> str:
    """Return the long option for a name or its abbreviation, as getopt_long(3) finds it. Raises ``Elsewhere``."""
    names = [prefix] if prefix in NAMES else [name for name in NAMES if name.startswith(prefix)]
    if len(names) != 1:
        raise StepForSlurm(f"the option --{prefix}")
    name = SYNONYMS.get(names[0], names[0])
    if name in ANSWERED:
        raise StepForSlurm
    if name not in OPTIONS:
        raise StepForSlurm(f"the option --{name}")
    return name


def parse(arguments: list[str], env: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the options, those of the environment included, and the command. Raises ``Elsewhere``."""
    options: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = long_name(name)
            kind = OPTIONS[name][1]
            if kind == ":" and not equals:
                if not rest:
                    raise StepForSlurm(f"the option --{name}")
                value = rest.pop(0)
            elif kind == "" and equals:
                raise StepForSlurm(f"the option --{name}")
            options.append((name, value))
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in ANSWERED:
                raise StepForSlurm
            if letter not in SHORT:
                raise StepForSlurm(f"the option -{letter}")
            name = SHORT[letter]
            kind, value = OPTIONS[name][1], ""
            if kind == ":" and not letters:
                if not rest:
                    raise StepForSlurm(f"the option -{letter}")
                value = rest.pop(0)
            elif kind != "":
                value, letters = letters, ""
            options.append((name, value))
    if not rest:
        raise StepForSlurm
    if ":" in rest:
        raise StepForSlurm("a heterogeneous step")
    return merged(options, of_environment(env)), rest


def merged(requested: list[tuple[str, str]], inherited: dict[str, str]) -> dict[str, str]:
    """Apply the options of the command line, the last of equal ones, on top of those that variables have set.

    Raises ``Elsewhere``.
    """
    options = {name: value or "1" if name == "kill-on-bad-exit" else value for name, value in requested}
    if options.keys() & {*GPU_COUNTS}:
        for name in (*GPU_COUNTS, "gpu-bind", "tres-bind"):
            inherited.pop(name, None)
    if options.keys() & {*CPU_COUNTS} or "cpu" in of_tres(options.get("tres-per-task", "")):
        for name in CPU_COUNTS:
            inherited.pop(name, None)
        parts = inherited.get("tres-per-task", "").split(",")
        inherited["tres-per-task"] = ",".join(part for part in parts if not part.startswith("cpu"))
    inherited.update(options)
    cpus = inherited.get("cpus-per-task")
    if inherited.get("cpus-per-gpu") and (cpus or "cpu" in of_tres(inherited.get("tres-per-task", ""))):
        raise StepForSlurm("--cpus-per-gpu with --cpus-per-task")
    return inherited


def of_environment(env: dict[str, str]) -> dict[str, str]:
    """Return the options that variables set. Raises ``Elsewhere``."""
    for name in OTHER_VARIABLES:
        if env.get(name):
            raise StepForSlurm(f"the variable {name}")
    options = {}
    for name, option in VARIABLES:
        value = env.get(name)
        if not value or (option in SWITCHES and value in ("0", "no", "false")):
            continue
        options[option] = value
    if env.get("SLURM_STEP_ID"):
        # A step inside a step: its parent has set these for itself.
        for option in ("distribution", "gpus", "gpu-bind", "tres-bind", "cpu-bind", "overcommit"):
            options.pop(option, None)
    return options


def number(options: dict[str, str], name: str, default: int, least: int = 1) -> int:
    """Return the value of a numeric option. Raises ``Elsewhere``."""
    text = options.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise StepForSlurm(f"--{name}={text}")
    return int(text)


def of_tres(text: str) -> dict[str, str]:
    """Read ``gres/gpu:1,cpu=2`` as ``{"gpu": "1", "cpu": "2"}``. Raises ``Elsewhere``."""
    counts = {}
    for part in filter(None, text.split(",")):
        name, equals, count = part.rpartition("=")
        if not equals:
            name, _, count = part.rpartition(":")
        kind = name.split(":")[0]
        if kind not in ("cpu", "gres/gpu") or not count.isdigit():
            raise StepForSlurm(f"--tres-per-task={text}")
        counts[kind[-3:]] = count
    return counts


def gpu_count(text: str, name: str) -> int:
    """Read ``2``, ``h100:2`` or ``h100``-less forms of a count of GPUs. Raises ``Elsewhere``."""
    count = text.rpartition(":")[2]
    if not count.isdigit() or "," in text:
        raise StepForSlurm(f"--{name}={text}")
    return int(count)


def gres_count(text: str) -> int:
    """Read ``gpu:2``, ``gpu:h100:1``, ``gpu`` or ``none``. Raises ``Elsewhere``."""
    if text.lower() == "none":
        return 0
    parts = text.replace("=", ":").split(":")
    if "," in text or parts[0] not in ("gpu", "gres/gpu"):
        raise StepForSlurm(f"--gres={text}")
    return int(parts[-1]) if parts[-1].isdigit() else 1


# --- the step


class Step:
    """A step on this node: its options, and the resources that it gets."""

    def __init__(self, options: dict[str, str], command: list[str], env: dict[str, str]) -> None:
        self.options, self.command, self.env = options, command, env
        self.job = env["SLURM_JOB_ID"]
        self.node = env.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        self.nested = bool(env.get("SLURM_STEP_ID"))
        self.id = 0
        self._check()
        tres = of_tres(options.get("tres-per-task", ""))
        of_job = env.get("SLURM_JOB_CPUS_PER_NODE", "1").partition("(")[0]
        self.job_cpus = int(of_job) if of_job.isdigit() else 1
        self.cpus_per_task = number(options, "cpus-per-task", int(tres.get("cpu", "0")), least=0)
        as_many_as_fit = self.job_cpus // self.cpus_per_task if self.cpus_per_task else 1
        per_node = number(options, "ntasks-per-node", max(1, as_many_as_fit))
        self.tasks = number(options, "ntasks", per_node)
        self.overcommit = "overcommit" in options
        self.overlap = "overlap" in options or self.nested
        self._count_gpus(tres)
        self.cpus_per_gpu = number(options, "cpus-per-gpu", 0)
        self.exact = bool("exact" in options or "exclusive" in options or self.cpus_per_task or self.cpus_per_gpu)
        self.cpus = max(self.tasks * max(1, self.cpus_per_task), self.gpu_count * self.cpus_per_gpu)
        if self.cpus > self.job_cpus and not self.overcommit:
            raise StepForSlurm(f"more CPUs than the job has: {self.cpus} of {self.job_cpus}")
        self.cpus = min(self.cpus, self.job_cpus) if self.exact else self.job_cpus
        self.wait_s = number(options, "wait", 0, least=0)
        self.kill_on_bad_exit = options.get("kill-on-bad-exit", "0") != "0"
        self.affinity: list[int] = []
        self.gpus: list[int] = []
        self.bound = False
        if "ntasks-per-node" in options and self.tasks > per_node:
            say(
                f"warning: can't honor --ntasks-per-node set to {per_node} which doesn't match the requested tasks "
                f"{self.tasks} with the maximum number of requested nodes 1. Ignoring --ntasks-per-node."
            )

    def _check(self) -> None:
        options = self.options
        if self.env.get("SLURM_JOB_NUM_NODES", "1") != "1" or options.get("nodes", "1") not in ("1", "1-1"):
            raise StepForSlurm("a step on several nodes")
        if options.get("mpi", "none") not in ("none", ""):
            raise StepForSlurm(f"--mpi={options['mpi']}")
        if options.get("jobid", self.job) != self.job:
            raise StepForSlurm("a step of another job")
        if options.get("nodelist", self.node) != self.node:
            raise StepForSlurm(f"--nodelist={options['nodelist']}")
        if options.get("open-mode", "a")[:1] not in ("a", "t"):
            raise StepForSlurm(f"--open-mode={options['open-mode']}")
        binding = {word.lower() for word in options.get("cpu-bind", "").split(",")} - {"", "quiet", "verbose", "q", "v"}
        if not binding <= {"none", "no", "n", "cores", "threads", "rank"}:
            raise StepForSlurm(f"--cpu-bind={options['cpu-bind']}")
        self.bind_cpus = not binding & {"none", "no", "n"}
        if "distribution" in options and options["distribution"].partition(":")[0] not in ("block", "cyclic", "*"):
            raise StepForSlurm(f"--distribution={options['distribution']}")

    def _count_gpus(self, tres: dict[str, str]) -> None:
        """Find the GPUs of the job and how many the step needs; its binding of tasks to GPUs."""
        options, env = self.options, self.env
        self.job_gpus = [word for word in env.get("SLURM_JOB_GPUS", "").split(",") if word]
        lists = {name: env[name].split(",") for name in GPU_LISTS if env.get(name)}
        self.gpu_lists = {name: words for name, words in lists.items() if len(words) == len(self.job_gpus)}
        binding = options.get("gpu-bind") or options.get("tres-bind", "").removeprefix("gres/gpu:")
        binding = ",".join(word for word in binding.split(",") if word not in ("verbose", "v"))
        binding = binding.removeprefix("verbose,")
        per_task = gpu_count(options["gpus-per-task"], "gpus-per-task") if options.get("gpus-per-task") else None
        if per_task is None and tres.get("gpu"):
            per_task = int(tres["gpu"])
        self.gpus_per_task = per_task
        if per_task is not None:
            requested = self.tasks * per_task
            binding = binding or f"per_task:{per_task}"
        elif options.get("gres"):
            requested = gres_count(options["gres"])
        elif options.get("gpus"):
            requested = gpu_count(options["gpus"], "gpus")
        elif options.get("gpus-per-node"):
            requested = gpu_count(options["gpus-per-node"], "gpus-per-node")
        else:
            requested = len(self.job_gpus)
        if requested > len(self.job_gpus) or (self.nested and requested != len(self.job_gpus)):
            raise StepForSlurm(f"GPUs that the job does not have: {requested} of {len(self.job_gpus)}")
        self.gpu_count = requested
        self.gpu_binding = "" if binding in ("", "none") else binding
        self.gpus_of_task(0, list(range(max(1, requested))))  # checks the binding

    def gpus_of_task(self, task: int, gpus: list[int]) -> list[int]:
        """Return the indices of a task's GPUs among those of the job. Raises ``Elsewhere``."""
        if not self.gpu_binding or not gpus:
            return gpus
        kind, _, text = self.gpu_binding.partition(":")
        try:
            if kind == "single":
                return [gpus[task // int(text) % len(gpus)]]
            if kind == "per_task":
                count = int(text)
                return gpus[task * count : (task + 1) * count] or gpus
            if kind in ("map_gpu", "mask_gpu"):
                words = [word for item in text.split(",") for word in repeated(item)]
                word = words[task % len(words)]
                if kind == "map_gpu":
                    chosen = {int(word, 0)}
                else:
                    mask = int(word, 16)
                    chosen = {bit for bit in range(mask.bit_length()) if mask >> bit & 1}
                names = next(iter(self.gpu_lists.values()), self.job_gpus)
                return [gpu for gpu in gpus if names[gpu].isdigit() and int(names[gpu]) in chosen] or gpus
        except (ValueError, ZeroDivisionError, IndexError):
            pass
        raise StepForSlurm(f"--gpu-bind={self.gpu_binding}")

    def cpus_of_task(self, task: int) -> list[int]:
        """Return the CPUs that a task is bound to; empty: no binding."""
        if not self.bound or self.overcommit:
            return []
        if self.cpus_per_gpu:
            return self.affinity
        each = max(1, self.cpus_per_task)
        return self.affinity[task * each : (task + 1) * each]

    @property
    def name(self) -> str:
        return f"{self.job}.{self.id}"

    def environment(self) -> dict[str, str]:
        """Return the environment of the tasks, without that of a single task. Raises ``Fault``."""
        options, env = self.options, self.env
        environment = exported(options.get("export", "ALL"), env)
        environment.pop(REAL_SRUN, None)
        if REAL_SRUN in env and "PATH" in environment:
            environment[REAL_SRUN] = env[REAL_SRUN]  # a task may start steps itself
        count = str(self.tasks)
        umask = os.umask(0)
        os.umask(umask)
        environment.update(
            SLURM_CPUS_ON_NODE=str(self.cpus),
            SLURM_DISTRIBUTION=options.get("distribution", "block" if self.tasks > 1 else "cyclic"),
            SLURM_GTIDS=",".join(map(str, range(self.tasks))),
            # On one node, this address remains valid when the job is restored on another one.
            SLURM_LAUNCH_NODE_IPADDR="127.0.0.1",
            SLURM_SRUN_COMM_HOST="127.0.0.1",
            SLURM_NODEID="0",
            SLURM_NPROCS=count,
            SLURM_NTASKS=count,
            SLURM_STEPID=str(self.id),
            SLURM_STEP_ID=str(self.id),
            SLURM_STEP_NODELIST=self.node,
            SLURM_STEP_NUM_NODES="1",
            SLURM_STEP_NUM_TASKS=count,
            SLURM_STEP_TASKS_PER_NODE=count,
            SLURM_TASKS_PER_NODE=count,
            SLURM_UMASK=f"{umask:04o}",
        )
        if "SRUN_DEBUG" not in environment and "ALL" in options.get("export", "ALL").upper().split(","):
            environment["SRUN_DEBUG"] = "3"
        tres = [f"gres/gpu={self.gpus_per_task}"] if self.gpus_per_task is not None else []
        if self.cpus_per_task:
            environment["SLURM_CPUS_PER_TASK"] = str(self.cpus_per_task)
            tres.append(f"cpu={self.cpus_per_task}")
        if tres:
            environment["SLURM_TRES_PER_TASK"] = ",".join(tres)
        if self.cpus_per_gpu:
            environment["SLURM_CPUS_PER_GPU"] = str(self.cpus_per_gpu)
        if options.get("job-name"):
            environment["SLURM_JOB_NAME"] = options["job-name"]
        if options.get("gpus"):
            environment["SLURM_GPUS"] = options["gpus"]
        if self.overcommit:
            environment["SLURM_OVERCOMMIT"] = "1"
        if self.gpu_binding:
            environment["SLURM_TRES_BIND"] = environment["SLURMD_TRES_BIND"] = f"gres/gpu:{self.gpu_binding}"
        if self.job_gpus:
            environment["SLURM_GPUS_ON_NODE"] = str(len(self.gpus))
        if self.job_gpus and not self.gpus:
            for name in ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", *GPU_LISTS):
                environment.pop(name, None)
        return environment

    def environment_of_task(self, task: int, common: dict[str, str]) -> dict[str, str]:
        variables = {
            **common,
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "SLURM_TASK_PID": str(os.getpid()),
        }
        gpus = self.gpus_of_task(task, self.gpus)
        if gpus:
            variables["SLURM_STEP_GPUS"] = ",".join(self.job_gpus[gpu] for gpu in gpus)
            for name, words in self.gpu_lists.items():
                variables[name] = ",".join(words[gpu] for gpu in gpus)
        return variables


def repeated(item: str) -> list[str]:
    """Read ``0*4`` of a map or mask as four entries."""
    word, star, count = item.partition("*")
    return [word] * (int(count) if star else 1)


def words_of(text: str) -> list[str]:
    """Split ``--export`` at commas outside of quotes, which remain, as srun does."""
    words = [""]
    quote = ""
    for letter in text:
        if letter == "," and not quote:
            words.append("")
            continue
        if letter in ("'", '"') and quote in ("", letter):
            quote = "" if quote else letter
        words[-1] += letter
    return words


def exported(text: str, env: dict[str, str]) -> dict[str, str]:
    """Return the variables that ``--export`` passes on. As with srun, the environment takes precedence over values."""
    variables: dict[str, str] = {}
    everything = False
    for word in words_of(text):
        name, equals, value = word.partition("=")
        if word.upper() in ("NONE", "NIL"):
            break
        if word.upper() == "ALL":
            everything = True
        elif equals:
            variables[name] = value
        elif name in env:
            variables[name] = env[name]
    always = {name for name in env if name.startswith(("SLURM_", "SLURMD_")) or name in (*GPU_LISTS, "TMPDIR")}
    return variables | {name: env[name] for name in (env if everything else always)}


# --- resources of steps that run at the same time


def open_counter(step: Step, restarts: int) -> int:
    """Open and lock the file with the ID of the job's next step. Raises ``Elsewhere``.

    The file stays on its node. A job that is restored on another node continues at another thousand, so that no file
    with the ID of a step in its name is overwritten.
    """
    attempt = step.env.get("SLURM_RESTART_COUNT") or "0"
    name = f".slurm-affinode-steps-{os.getuid()}-{step.job}-{attempt}"
    try:
        fd = own_file(name)
        fcntl.flock(fd, fcntl.LOCK_EX)
        text = os.pread(fd, 16, 0)
    except OSError as error:
        raise StepForSlurm(f"the file {name}: {error.strerror}") from None
    first = 0 if str(restarts) == attempt else restarts * STEPS_PER_RESTART
    step.id = int(text) if text.isdigit() else first
    return fd


def own_file(name: str) -> int:
    """Open the user's file of this name in /tmp. If another user has taken the name, a random end is added to it."""
    # No process of another user can open this job's namespace, and hold its lock.
    lock = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        existing = sorted(entry for entry in os.listdir("/tmp") if entry.startswith(f"{name}."))  # noqa: S108 - checked below
        for candidate in (name, *existing, f"{name}.{os.urandom(8).hex()}"):
            try:
                fd = os.open(f"/tmp/{candidate}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)  # noqa: S108
            except OSError as error:
                if error.errno in (errno.EACCES, errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    continue
                raise
            status = os.fstat(fd)
            if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
                return fd
            os.close(fd)
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    finally:
        os.close(lock)


def running() -> list[tuple[int, dict[str, str]]]:
    """Return the launchers of other steps that do not overlap, with the environment of each of their tasks."""
    parents: dict[int, int] = {}
    launchers = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                head, _, tail = file.read().rpartition(")")
        except (OSError, ValueError):
            continue
        fields = tail.split()
        if fields[0] in "ZX":
            continue
        parents[int(entry)] = int(fields[1])
        if head.partition("(")[2] == COMM and int(entry) != os.getpid():
            launchers.add(int(entry))
    processes = []
    for pid, parent in parents.items():
        if parent in launchers:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    processes.append((parent, pairs_of(file.read())))
            except OSError:
                continue
    return processes


def positions(env: dict[str, str]) -> list[int]:
    """Return the indices of a task's GPUs among those of its job.

    A restored job may have other GPUs, but the environment of its tasks is that of the attempt in which they began.
    """
    of_job = env.get("SLURM_JOB_GPUS", "").split(",")
    return [of_job.index(gpu) for gpu in env.get("SLURM_STEP_GPUS", "").split(",") if gpu and gpu in of_job]


def choose(step: Step) -> bool:
    """Choose the CPUs and GPUs of the step among those that no other step has. False: not enough are free."""
    active_steps = [] if step.overlap else running()
    cpus = {pid: int(env.get("SLURM_CPUS_ON_NODE", "0")) for pid, env in active_steps}
    used = {gpu for _, env in active_steps for gpu in positions(env)}
    free = [index for index in range(len(step.job_gpus)) if index not in used]
    if sum(cpus.values()) + step.cpus > step.job_cpus or step.gpu_count > len(free):
        return False
    step.gpus = free[: step.gpu_count]
    allowed = os.sched_getaffinity(0)
    # Only where the site binds jobs to their CPUs: else the CPUs of other jobs are among them.
    step.bound = step.exact and step.bind_cpus and step.cpus <= len(allowed) <= step.job_cpus
    if step.bound:
        bound = set()
        for pid in cpus:
            try:
                affinity = os.sched_getaffinity(pid)
            except OSError:
                continue
            bound |= affinity if len(affinity) < len(allowed) else set()
        step.affinity = (sorted(allowed - bound) + sorted(allowed & bound))[: step.cpus]
    return True


def allocate(step: Step, restarts: int) -> int:
    """Give the step its ID, CPUs and GPUs; wait until other steps have released them. Returns the lock."""
    pause = 0.1
    waited = False
    while True:
        fd = open_counter(step, restarts)
        if choose(step):
            os.pwrite(fd, str(step.id + 1).encode(), 0)
            if waited and "quiet" not in step.options:
                say(f"Step created for StepId={step.name}")
            return fd
        os.close(fd)
        waited = True
        time.sleep(pause)
        pause = min(1.0, pause * 2)


# --- input and output


def is_per_task(pattern: str) -> bool:
    """Return whether each task or node has a file of its own."""
    if "\\" in pattern:
        return False
    letters = [part.lstrip("0123456789")[:1] for part in pattern.replace("%%", "").split("%")[1:]]
    return not {"t", "n", "N"}.isdisjoint(letters)


def expand(pattern: str, step: Step, task: int) -> str:
    """Return the name of a file for a task."""
    if "\\" in pattern:
        return pattern.replace("\\", "")
    env = step.env
    array = env.get("SLURM_ARRAY_TASK_ID") or NO_ARRAY
    values = {
        "j": step.job, "J": step.name, "s": str(step.id), "t": str(task), "n": "0", "N": step.node, "a": array,
        "A": env.get("SLURM_ARRAY_JOB_ID") or step.job, "b": str(int(array) % 10), "x": env.get("SLURM_JOB_NAME", ""),
        "u": env.get("SLURM_JOB_USER") or env.get("USER", ""), "%": "%",
    }  # fmt: skip
    parts = []
    position = 0
    while position < len(pattern):
        if pattern[position] != "%":
            parts.append(pattern[position])
            position += 1
            continue
        end = position + 1
        while end < len(pattern) and pattern[end].isdigit():
            end += 1
        letter = pattern[end : end + 1]
        if letter in values and letter:
            width = min(int(pattern[position + 1 : end] or "0"), 10)
            parts.append(values[letter].zfill(width) if letter in "jsntaAb" else values[letter])
        else:
            parts.append(pattern[position : end + 1])
        position = end + 1
    return "".join(parts)


class Sink:
    """Where output goes. ``relayed``: through the launcher, line by line, as srun does."""

    def __init__(self, fd: int, relayed: bool) -> None:
        self.fd, self.relayed = fd, relayed


class Streams:
    """The standard streams of all tasks."""

    def __init__(self, step: Step, directory: str) -> None:
        self._step, self._directory = step, directory
        self._opened: dict[str, int] = {}
        self._label = "label" in step.options
        self._relayed = self._label or (step.tasks > 1 and "unbuffered" not in step.options)
        self._width = len(str(step.tasks - 1))
        self._pipes: dict[int, tuple[int, int, bytes]] = {}  # read end -> task, output, unfinished line
        self._inputs: dict[int, bytes] = {}  # write end -> bytes to write
        self._feeds: list[int] = []
        self._completion = _thread.allocate_lock()

    def _open(self, name: str, flags: int) -> int:
        path = os.path.join(os.getcwd(), name)
        if path not in self._opened:
            try:
                try:
                    self._opened[path] = os.open(path, flags | os.O_CLOEXEC, 0o666)
                except FileNotFoundError:
                    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                    self._opened[path] = os.open(path, flags | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise Fault(f"Could not open {path}: {error.strerror}") from None
        return self._opened[path]

    def _file(self, pattern: str, task: int) -> str:
        """Return the path of a file: that of a task or node is in the directory of the tasks, another one in srun's."""
        name = expand(pattern, self._step, task)
        return os.path.join(self._directory, name) if is_per_task(pattern) else name

    def _null(self) -> int:
        return self._open("/dev/null", os.O_RDWR)

    def _sink(self, text: str, own_fd: int, task: int) -> Sink:
        if text.lower() in ("", "all"):
            return Sink(own_fd, self._relayed)
        if text.lower() == "none":
            return Sink(self._null(), False)
        if text.isdigit():
            return Sink(own_fd, self._label) if int(text) == task else Sink(self._null(), False)
        mode = os.O_APPEND if self._step.options.get("open-mode", "t").startswith("a") else os.O_TRUNC | os.O_APPEND
        name = self._file(text, task)
        shared = self._step.tasks > 1 and name == self._file(text, task + 1)
        return Sink(self._open(name, os.O_WRONLY | os.O_CREAT | mode), self._relayed if shared else self._label)

    def _output(self, sink: Sink, task: int) -> int:
        if not sink.relayed:
            return sink.fd
        write_end, read_end = os.pipe2(os.O_CLOEXEC)
        self._pipes[write_end] = (task, sink.fd, b"")
        return read_end

    def _input(self, task: int) -> int:
        text = self._step.options.get("input", "all")
        if text.isdigit():
            return 0 if int(text) == task else self._null()
        if text.lower() == "none":
            return self._null()
        if text.lower() != "all":
            return os.open(self._file(text, task), os.O_RDONLY | os.O_CLOEXEC)
        try:
            mode = os.fstat(0).st_mode
        except OSError:
            return self._null()
        if self._step.tasks == 1 or (stat.S_ISCHR(mode) and not os.isatty(0)):
            return 0
        if stat.S_ISREG(mode):
            fd = os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(fd, os.lseek(0, 0, os.SEEK_CUR), os.SEEK_SET)
            return fd
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        self._inputs[write_end] = b""
        return read_end

    def of_task(self, task: int) -> list[int]:
        """Return the descriptors of a task's standard streams. Raises ``Fault``."""
        options = self._step.options
        out = options.get("output", "")
        err = options.get("error", out)
        try:
            fds = [self._input(task)]
        except OSError as error:
            raise Fault(f"Could not open stdin file: {error.filename}: {error.strerror}") from None
        fds.append(self._output(self._sink(out, 1, task), task))
        fds.append(self._output(self._sink(err, 2, task), task))
        return fds

    def close(self, fds: list[int]) -> None:
        """Close the launcher's copies of a task's descriptors that no other task uses."""
        open_fds = {0, 1, 2, *self._opened.values()}
        for fd in set(fds) - open_fds:
            os.close(fd)

    def start(self) -> None:
        """Start to relay."""
        self._completion.acquire()
        if self._pipes or self._inputs:
            _thread.start_new_thread(self._relay, ())
        else:
            self._completion.release()

    def finish(self) -> None:
        """Wait until all output is written."""
        self._completion.acquire()

    def _relay(self) -> None:
        try:
            self._loop()
        finally:
            self._completion.release()

    def _loop(self) -> None:
        reading = bool(self._inputs)
        while self._pipes:
            poll = select.poll()
            for fd in self._pipes:
                poll.register(fd, select.POLLIN)
            if reading and max(map(len, self._inputs.values()), default=MOST_INPUT) < MOST_INPUT:
                poll.register(0, select.POLLIN)
            for fd, waiting in list(self._inputs.items()):
                if waiting:
                    poll.register(fd, select.POLLOUT)
                elif not reading:
                    os.close(fd)
                    del self._inputs[fd]
            for fd, _ in poll.poll():
                if fd in self._pipes:
                    self._read(fd)
                elif fd in self._inputs:
                    self._feed(fd)
                else:
                    data = os.read(0, BUFFER)
                    reading = bool(data)
                    for write_end in self._inputs:
                        self._inputs[write_end] += data

    def _feed(self, fd: int) -> None:
        try:
            self._inputs[fd] = self._inputs[fd][os.write(fd, self._inputs[fd]) :]
        except BlockingIOError:
            pass
        except OSError:
            os.close(fd)
            del self._inputs[fd]

    def _read(self, fd: int) -> None:
        task, out, begun = self._pipes[fd]
        data = os.read(fd, BUFFER)
        lines, newline, rest = (begun + data).rpartition(b"\n")
        whole = lines + newline
        if len(rest) > BUFFER or not data:
            whole, rest = whole + rest, b""
        if self._label and whole:
            prefix = f"{task:>{self._width}}: ".encode()
            whole = b"".join(prefix + line + b"\n" for line in whole.removesuffix(b"\n").split(b"\n"))
        self._pipes[fd] = (task, out, rest)
        while whole:
            try:
                whole = whole[os.write(out, whole) :]
            except BlockingIOError:
                select.select([], [out], [])
            except BrokenPipeError:
                os.kill(os.getpid(), signal.SIGPIPE)  # forwarded to the tasks
                break
            except OSError:
                break
        if not data:
            os.close(fd)
            del self._pipes[fd]


# --- tasks


def find(command: str, env: dict[str, str]) -> str:
    """Return the path that slurmstepd would execute."""
    if "/" in command:
        return command
    for place in env.get("PATH", "").split(":") if "PATH" in env else ():
        path = os.path.join(place, command)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return command


def run_task(step: Step, task: int, fds: list[int], group: int, directory: str, common: dict[str, str]) -> None:
    """Become the task. Does not return."""
    number = 1
    try:
        os.setpgid(0, group)
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in fds]
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        for fd in fds:
            os.close(fd)
        try:
            os.chdir(directory)
        except OSError as error:
            complain(step, f"couldn't chdir to `{directory}': {error.strerror}: going to /tmp instead")
            os.chdir("/tmp")  # noqa: S108 - as slurmstepd does
        cpus = step.cpus_of_task(task)
        if cpus:
            os.sched_setaffinity(0, cpus)
        env = step.environment_of_task(task, common)
        default_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            os.execve(find(step.command[0], env), step.command, env)
        except OSError as error:
            number = error.errno or 1
            complain(step, f"execve(): {step.command[0]}: {error.strerror}")
    except OSError as error:
        complain(step, f"task {task}: {error.strerror}")
    finally:
        os._exit(number)


def complain(step: Step, text: str) -> None:
    """Write a line as slurmstepd does."""
    try:
        os.write(2, f"slurmstepd-{step.node}: error: {text}\n".encode(errors="surrogateescape"))
    except OSError:
        pass


def ranges(tasks: list[int]) -> str:
    """Return ``task 3`` or ``tasks 0-2,5``."""
    parts: list[list[int]] = []
    for task in sorted(tasks):
        if parts and parts[-1][1] == task - 1:
            parts[-1][1] = task
        else:
            parts.append([task, task])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"{'task' if len(tasks) == 1 else 'tasks'} {text}"


class Tasks:
    """The processes of the step, from their start to the exit status of srun."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._pids: dict[int, int] = {}
        self._group = 0
        self._exits: list[tuple[int, int]] = []  # task, wait status: not yet reported
        self._first_exit = self._report_at = self._kill_at = 0.0
        self._interrupted = 0.0
        self._stopping = self._aborted = False
        self._worst = (False, 0)  # by a signal, number: a signal counts more than any exit code

    @property
    def worst(self) -> int:
        """The exit status of srun."""
        by_signal, number = self._worst
        return 128 + number if by_signal else number

    def start(self, streams: Streams, directory: str) -> None:
        """Start all tasks. Raises ``Fault``; no task is left then."""
        common = self._step.environment()
        try:
            for task in range(self._step.tasks):
                fds = streams.of_task(task)
                pid = os.fork()
                if pid == 0:
                    run_task(self._step, task, fds, self._group, directory, common)
                self._group = self._group or pid
                try:
                    os.setpgid(pid, self._group)
                except OSError:
                    pass  # it did that itself, and runs its program
                streams.close(fds)
                self._pids[pid] = task
        except (OSError, Fault) as error:
            self._signal(signal.SIGKILL)
            raise Fault(str(error)) from None

    def wait(self) -> None:
        """Wait until all tasks have ended."""
        while self._pids:
            due = [moment for moment in (self._report_at, self._kill_at, self._wait_until()) if moment]
            info = (
                signal.sigtimedwait(WAITED, max(0.0, min(due) - time.monotonic()))
                if due
                else signal.sigwaitinfo(WAITED)
            )
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._take(info)
            self._reap()
            self._tick()
        self._report()
        self._signal(signal.SIGKILL)  # processes that they have left
        if self._worst in ((True, signal.SIGTERM), (True, signal.SIGKILL)) and not self._aborted:
            self._info(f"Force Terminated StepId={self._step.name}")

    def _wait_until(self) -> float:
        return (
            self._first_exit + self._step.wait_s
            if self._step.wait_s and self._first_exit and not self._stopping
            else 0.0
        )

    def _info(self, text: str) -> None:
        if "quiet" not in self._step.options:
            say(text)

    def _signal(self, number: int) -> None:
        try:
            if self._group:
                os.killpg(self._group, number)
        except OSError:
            pass

    def _take(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if info.si_pid == 0 and info.si_code <= 0:
            return  # from outside of the job's PID namespace: Slurm has sent it to the tasks as well
        if number in FORWARDED:
            self._signal(number)
        elif number in ENDING:
            if number == signal.SIGQUIT:
                self._info("Quit")
            self._info("forcing job termination")
            self._stop(signal.SIGTERM)
        elif "quit-on-interrupt" in self._step.options or time.monotonic() - self._interrupted < INTERRUPT_S:
            self._info(f"sending Ctrl-C to StepId={self._step.name}")
            self._info("forcing job termination")
            self._stop(signal.SIGINT)
        elif "disable-status" in self._step.options:
            self._interrupted = time.monotonic()
            self._info(f"sending Ctrl-C to StepId={self._step.name}")
            self._signal(signal.SIGINT)
        else:
            self._interrupted = time.monotonic()
            self._info("interrupt (one more within 1 sec to abort)")
            self._info(f"StepId={self._step.name} {ranges(list(self._pids.values()))}: running")

    def _stop(self, number: int) -> None:
        if not self._stopping:
            cancel_time = time.strftime("%Y-%m-%dT%H:%M:%S")
            complain(self._step, f"*** STEP {self._step.name} ON {self._step.node} CANCELLED AT {cancel_time} ***")
        self._stopping = True
        self._kill_at = self._kill_at or time.monotonic() + TERM_S
        self._signal(signal.SIGCONT)
        self._signal(number)

    def _reap(self) -> None:
        now = time.monotonic()
        while self._pids:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._pids.clear()
                break
            if pid == 0:
                break
            if pid not in self._pids:
                continue
            self._exits.append((self._pids.pop(pid), status))
            self._first_exit = self._first_exit or now
            self._report_at = self._report_at or now + MESSAGE_S

    def _tick(self) -> None:
        now = time.monotonic()
        if self._report_at and now >= self._report_at:
            self._report()
        until = self._wait_until()
        if until and now >= until and self._pids:
            self._info(f"First task exited {self._step.wait_s}s ago")
            self._info(f"StepId={self._step.name} {ranges(list(self._pids.values()))}: running")
            ended = sorted(set(range(self._step.tasks)) - set(self._pids.values()))
            self._info(f"StepId={self._step.name} {ranges(ended)}: exited")
            self._info(f"Terminating StepId={self._step.name}")
            self._aborted = True
            self._stop(signal.SIGKILL)
        if self._kill_at and now >= self._kill_at:
            self._signal(signal.SIGKILL)
            self._kill_at = now + TERM_S

    def _report(self) -> None:
        """Report the tasks that have ended, and take their exit status into account."""
        self._report_at = 0.0
        texts: dict[str, list[int]] = {}
        for task, status in self._exits:
            number = os.WEXITSTATUS(status) if os.WIFEXITED(status) else os.WTERMSIG(status)
            self._worst = max(self._worst, (os.WIFSIGNALED(status), number))
            if os.WIFEXITED(status):
                text = f"Exited with exit code {number}" if number else ""
            else:
                text = signal.strsignal(number) or f"Signal {number}"
                text += " (core dumped)" if os.WCOREDUMP(status) else ""
            if text:
                texts.setdefault(text, []).append(task)
        self._exits.clear()
        for text, tasks in sorted(texts.items(), key=lambda item: min(item[1])):
            say(f"error: {self._step.node}: {ranges(tasks)}: {text}")
        if texts and self._step.kill_on_bad_exit and self._pids and not self._stopping:
            self._info(f"Terminating StepId={self._step.name}")
            self._stop(signal.SIGTERM)


def run(step: Step, restarts: int) -> int:
    """Run the step; return the exit status of srun. Raises ``Fault`` and ``Elsewhere``."""
    with open("/proc/self/comm", "w") as file:
        file.write(COMM_OVERLAP if step.overlap else COMM)
    # A signal ends a launcher that waits for resources.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    lock = allocate(step, restarts)
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    if step.bound:
        os.sched_setaffinity(0, step.affinity)  # tells other launchers which CPUs are taken
    directory = os.path.join(os.getcwd(), step.options.get("chdir", ""))
    streams = Streams(step, directory if os.path.isdir(directory) else os.getcwd())
    tasks = Tasks(step)
    tasks.start(streams, directory.rstrip("/") or "/")
    streams.start()
    os.close(lock)
    tasks.wait()
    streams.finish()
    return tasks.worst


def main() -> int:
    env = initial_environment()
    own_dir = os.path.dirname(os.path.realpath(__file__))
    arguments = sys.argv[1:]
    try:
        attempt = attempt_of(env)
        if attempt is None:
            become_real(env, own_dir, arguments)
            return 1
        restarts = attempt[0]
        env = current(env, *attempt)
        try:
            options, command = parse(arguments, env)
            return run(Step(options, command, env), restarts)
        except StepForSlurm as reason:
            if reason.args:
                say(f"slurm-affinode: {reason} needs Slurm's srun: the job cannot be suspended while this step runs")
            become_real(env, own_dir, arguments)
            return 1
    except Fault as error:
        say(f"error: slurm-affinode: {error}")
    except OSError as error:
        say(f"error: slurm-affinode: {error.filename or ''}: {os.strerror(error.errno or errno.EIO)}")
    return 1


if __name__ == "__main__":
    os._exit(main())
