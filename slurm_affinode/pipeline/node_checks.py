"""Checks of ``doctor`` on a node with an agent: CRIU and the kernel, services, GPUs and memory, stores. Read-only.

Those of the agent's process are in agent_process, those of the SPANK plugin in plugin_check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slurm_affinode.base import kernel_text, process
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.node_config import SuspendConfig
from slurm_affinode.base.pidfd import PROC
from slurm_affinode.base.text import counted, size
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.files import device_files
from slurm_affinode.checkpoint.files.service_connections import Services
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.root_directory import check_above, open_top
from slurm_affinode.checkpoint.store.tiers import filesystem
from slurm_affinode.model.gpu import Device, total_mib
from slurm_affinode.pipeline import agent_process, plugin_check
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, UNREACHABLE, Check, guarded
from slurm_affinode.slurm.interface import Runner, complaint

CGROUPS = Path("/sys/fs/cgroup")
NSSWITCH = Path("/etc/nsswitch.conf")
_TIMEOUT_S = 30.0
_MIB = 2**20
_SQUASHED_UID = 65534
"""The user to which ``root_squash`` maps root, by default."""
_PER_JOB = 1024
"""Namespaces of a kind that a node needs at the most: one for each job that can be suspended."""
_NAME_SERVICES = frozenset({
    "files", "compat", "db", "dns", "myhostname", "nis", "nisplus", "hesiod",
    "mdns", "mdns4", "mdns6", "mdns_minimal", "mdns4_minimal", "mdns6_minimal", "resolve", "mymachines",
    "sss", "ldap", "systemd",
})  # fmt: skip
"""Modules of nsswitch.conf(5) that keep no connection to a service, and those whose services are in the default of
``suspend.services``."""
_LISTENS = 1 << 16
"""``__SO_ACCEPTCON`` in ``/proc/net/unix``."""


def examine(
    config: Config,
    run: Runner = process.run,
    *,
    gpus: Sequence[Device] = (),
    agent: Callable[[], int | None] = lambda: None,
    proc: Path = PROC,
    cgroup_root: Path = CGROUPS,
    nsswitch: Path = NSSWITCH,
) -> list[Check]:
    """Return the checks of this node; none without a shared store or a readable key, where no agent can run.

    ``gpus``: of this node. ``agent``: returns the PID of the running agent, or ``None``.
    """
    suspend = config.suspend
    if suspend.shared_store is None or not os.access(suspend.key_file, os.R_OK):
        return []
    slurm = plugin_check.installed(run)
    checks = guarded("CRIU", lambda: [criu(suspend.criu, run)])
    if config.agent.listen:
        checks.append(munge(run))
    return [
        *checks, *clock(run), *persistence_mode(run), *shared_store(suspend.shared_store),
        *agent_process.checks(agent(), proc=proc),
        *cgroups(None if slurm is None else slurm.settings, root=cgroup_root),
        *host_memory(gpus, proc=proc),
        *namespaces(proc / "sys"),
        *services(suspend, proc=proc, nsswitch=nsswitch),
        plugin_check.check(suspend, slurm),
    ]  # fmt: skip


def criu(program: str, run: Runner) -> Check:
    """Check the release of CRIU, and with ``criu check`` the kernel. Raises ``CheckpointError``."""
    version = Criu(program=program, runner=run).check()
    completed = run([process.find(program), "check"], timeout_s=_TIMEOUT_S, check=False)
    if completed.returncode != 0:
        hint = (
            f"run {program} check --all; boot a kernel that has the missing features, such as that of the distribution"
        )
        return Check("CRIU", PROBLEM, f"version {version} does not work with this kernel: {complaint(completed)}", hint)
    return Check("CRIU", OK, f"version {version}, and the kernel has what it needs")


def munge(run: Runner) -> Check:
    """Check that munged certifies messages, without which no login node reaches the agent."""
    try:
        completed = run(["munge", "--no-input"], timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError as error:
        return Check("munge", UNREACHABLE, str(error), "install munge, with the key of the cluster")
    if completed.returncode != 0:
        return Check("munge", UNREACHABLE, f"no credential: {complaint(completed)}", "systemctl enable --now munge")
    return Check("munge", OK, "certifies messages")


def clock(run: Runner) -> list[Check]:
    """Check that the clock is synchronized: credentials of munge expire; nothing without ``timedatectl``."""
    query = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        completed = run(query, timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError:
        return []
    synchronized = completed.stdout.decode("utf-8", "replace").strip()
    if synchronized == "no":
        hint = "systemctl enable --now chrony (chronyd on RHEL), or systemd-timesyncd"
        return [Check("clock", PROBLEM, "is not synchronized: other nodes may reject credentials of munge", hint)]
    return [Check("clock", OK, "is synchronized")] if synchronized == "yes" else []


def persistence_mode(run: Runner) -> list[Check]:
    """Check that the driver stays loaded while no process uses a GPU; nothing without ``nvidia-smi``."""
    query = ["nvidia-smi", "--query-gpu=index,persistence_mode", "--format=csv,noheader"]
    try:
        completed = run(query, timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError:
        return []
    modes = dict(
        line.split(", ", 1) for line in completed.stdout.decode("utf-8", "replace").splitlines() if ", " in line
    )
    if completed.returncode != 0 or not modes:
        return []  # the check of the driver says why
    if disabled := [gpu for gpu, mode in modes.items() if mode.strip() == "Disabled"]:
        detail = f"off for GPU {', '.join(disabled)}: each restore waits until the driver is loaded"
        return [Check("persistence mode", PROBLEM, detail, "systemctl enable --now nvidia-persistenced")]
    return [Check("persistence mode", OK, "on")]


def shared_store(path: Path, *, owner: int | None = None) -> list[Check]:
    """Check that the shared store belongs to root alone, and that root may write to it, unlike with ``root_squash``.

    ``owner``: in place of this user.
    """
    name, owner = "shared store", os.geteuid() if owner is None else owner
    exported = "export it with no_root_squash"
    if not path.exists():
        where = path.parent
        hint = f"mount it, or create it: install -d -m 0700 {path}"
        return [] if where.exists() else [Check(name, PROBLEM, f"{where}: does not exist", hint)]
    try:
        os.close(open_top(path, owner=owner, create=False))
        check_above(path, owner=owner)
    except CheckpointError as error:
        squashed = _SQUASHED_UID in (path.stat().st_uid, path.parent.stat().st_uid)
        return [Check(name, PROBLEM, str(error), f"{exported}, then: {error.hint}" if squashed else error.hint)]
    if not os.access(path, os.W_OK | os.X_OK):
        hint = f"{exported}; without NFS: chown root: {path} && chmod 0700 {path}"
        return [Check(name, PROBLEM, f"{path}: this user may not write to it", hint)]
    return [Check(name, OK, f"{path}: can be written ({filesystem(path) or 'unknown file system'})")]


def cgroups(settings: Mapping[str, str] | None, *, root: Path = CGROUPS) -> list[Check]:
    """Check that the kernel has the cgroups that Slurm's configuration requires. ``settings``: of Slurm, if known."""
    name, unified = "cgroups", (root / "cgroup.controllers").exists()
    if not root.is_dir():
        return [Check(name, PROBLEM, f"{root}: does not exist", "boot with systemd, which mounts cgroups")]
    try:
        controllers = (
            (root / "cgroup.controllers").read_text(encoding="ascii").split()
            if unified
            else sorted(
                path.name for path in root.iterdir() if (path / "cgroup.procs").exists() and path.name != "unified"
            )
        )
    except OSError as error:
        return [Check(name, PROBLEM, f"{root}: cannot be read: {error.strerror}", f"ls -l {root}")]
    version = 2 if unified else 1
    shown = f"version {version} ({', '.join(controllers) or 'no controllers'})"
    if settings is None:
        return [Check(name, OK, f"{shown}; Slurm's use of them is unknown")]
    plugin = settings.get("CgroupPlugin", "autodetect")
    if plugin == f"cgroup/v{3 - version}" and not (plugin == "cgroup/v2" and (root / "unified").exists()):
        return [Check(
            name, PROBLEM, f"{shown}, and CgroupPlugin={plugin} in cgroup.conf",
            "set CgroupPlugin=autodetect in cgroup.conf, then: systemctl restart slurmd",
        )]  # fmt: skip
    if settings.get("ConstrainRAMSpace") == "yes" and "memory" not in controllers:
        return [Check(
            name, PROBLEM, f"{shown}: Slurm limits the memory of jobs (ConstrainRAMSpace), and there is no controller",
            "remove cgroup_disable=memory from the parameters of the kernel in /etc/default/grub, then: "
            "update-grub && reboot (RHEL: grubby --update-kernel=ALL --remove-args=cgroup_disable=memory)",
        )]  # fmt: skip
    track = settings.get("ProctrackType", "")
    if track != "proctrack/cgroup":
        return [Check(
            name, SKIPPED, f"{shown}; ProctrackType={track or '(unknown)'}: processes of jobs are identified by "
            "their slurmstepd alone",
            "set ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup in slurm.conf",
        )]  # fmt: skip
    limited = [kind for kind, key in (("cores", "ConstrainCores"), ("devices", "ConstrainDevices"),
                                      ("memory", "ConstrainRAMSpace")) if settings.get(key) == "yes"]  # fmt: skip
    return [Check(name, OK, f"{shown}; Slurm confines jobs to their {', '.join(limited) or 'processes'}")]


def host_memory(gpus: Iterable[Device], *, proc: Path = PROC) -> list[Check]:
    """Compare the memory of the GPUs with that of the host, which takes it in for a suspension; nothing without GPUs.

    Less is no problem: a suspension needs only the memory of its own job, and is refused if there is too little.
    """
    gpus = [gpu for gpu in gpus if gpu.mig is None]
    of_gpus = total_mib(gpu.memory_mib for gpu in gpus)
    with suppress(OSError):
        of_host = kernel_text.kib(kernel_text.table(kernel_text.lines(proc / "meminfo")).get("MemTotal"))
        if gpus and of_gpus is not None and of_host is not None:
            needed = round(of_gpus * _MIB)
            shown = f"{size(of_host)}, {counted(len(gpus), 'GPU')} with {size(needed)}"
            if needed <= of_host:
                return [Check("host memory", OK, shown)]
            return [Check(
                "host memory", SKIPPED,
                f"{shown}: jobs with more GPU memory than the host has free are not suspended at the same time "
                "(host-memory), nor do they sleep in place together",
                f"for all GPUs at once, in place: at least {size(needed)} of memory; for one job at a time: that of "
                "its GPUs, and suspend.max_at_once = 1",
            )]  # fmt: skip
    return []


def namespaces(sysctl: Path = PROC / "sys") -> list[Check]:
    """Check that the kernel permits the namespaces of each job, and report whether users may create their own."""
    name = "namespaces"
    limits = {kind: _number(sysctl / "user" / f"max_{kind}_namespaces") for kind in ("pid", "mnt", "user")}
    few = [kind for kind in ("pid", "mnt") if (limit := limits[kind]) is not None and limit < _PER_JOB]
    if few:
        keys = [f"user.max_{kind}_namespaces" for kind in few]
        detail = ", ".join(f"{key} is {limits[kind]}" for key, kind in zip(keys, few, strict=True))
        return [Check(
            name, PROBLEM, f"{detail}: each job with --gpu-suspend-idle has one",
            f"sysctl -w {' '.join(f'{key}={2 * _PER_JOB}' for key in keys)}, and the same in /etc/sysctl.d",
        )]  # fmt: skip
    if limits["user"] is None:
        return []
    closed = limits["user"] == 0 or _number(sysctl / "kernel" / "unprivileged_userns_clone") == 0
    containers = "containers of users (Apptainer, enroot) cannot be suspended with mode=requeue"
    users = "users cannot create user namespaces" if closed else f"users can create user namespaces: {containers}"
    return [Check(name, OK, f"each job can have its own; {users}")]


def _number(path: Path) -> int | None:
    """Return the number in a file of the kernel; ``None``: it has none."""
    with suppress(OSError):
        return kernel_text.number(kernel_text.lines(path)[0])
    return None


def services(suspend: SuspendConfig, *, proc: Path = PROC, nsswitch: Path = NSSWITCH) -> list[Check]:
    """Report the services of this node whose connections a restore closes, and those that may prevent a suspension.

    CRIU cannot dump a connection to a service outside of the job, such as SSSD.
    """
    name, services = "name services", Services(suspend.services)
    with suppress(OSError):
        listening = sorted({address for address in _listening(proc / "net" / "unix") if services.names(address)})
        shown = f"a restore closes connections to {_few(listening)}" if listening else "no service of suspend.services"
        reason = device_files.why_no_plugin(suspend.criu_plugin)
        if listening and reason is not None:
            return [Check(
                name, PROBLEM, f"{reason}: jobs with a connection to {_few(listening)} are not suspended",
                "install the package slurm-affinode-spank, or: make -C spank install",
            )]  # fmt: skip
        if unknown := sorted(_modules(nsswitch) - _NAME_SERVICES):
            return [Check(
                name, SKIPPED, f"{shown}; {nsswitch} names {', '.join(unknown)}: if jobs keep a connection to its "
                "service, their suspension fails",
                "ss --listening --unix --processes shows its socket; if its clients connect again, add it to "
                "suspend.services, and its user to suspend.service_users",
            )]  # fmt: skip
        return [Check(name, OK, shown)]
    return []


def _listening(path: Path) -> Iterable[str]:
    """Yield the addresses in ``/proc/net/unix`` on which a service listens. Raises ``OSError``."""
    for line in kernel_text.lines(path)[1:]:
        words = line.split(None, 7)
        if len(words) == 8 and (kernel_text.number(words[3], 16) or 0) & _LISTENS and words[7].startswith("/"):
            yield words[7]


def _modules(nsswitch: Path) -> set[str]:
    """Return the modules that ``nsswitch.conf`` names for users, groups and hosts."""
    modules: set[str] = set()
    with suppress(OSError):
        for line in nsswitch.read_text(encoding="utf-8", errors="replace").splitlines():
            database, _, words = line.partition("#")[0].partition(":")
            if database.strip() in ("passwd", "group", "initgroups", "hosts"):
                modules.update(word for word in words.split() if not word.startswith(("[", "!")) and "=" not in word)
    return modules


def _few(names: Sequence[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
