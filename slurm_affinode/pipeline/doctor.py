"""``doctor``: checks of this machine and of the live Slurm; that of the NVIDIA driver is in driver_check. Read-only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from slurm_affinode.analysis import emissions, prices
from slurm_affinode.base import extras, process
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.process import Helper
from slurm_affinode.base.process import run as run_program
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.checkpoint import yama
from slurm_affinode.checkpoint.files import device_files
from slurm_affinode.pipeline import known_holes
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, UNREACHABLE, Check, guarded
from slurm_affinode.pipeline.known_holes import HoleFinding
from slurm_affinode.slurm import scontrol
from slurm_affinode.slurm.accounting import sacct_command
from slurm_affinode.slurm.client import Availability
from slurm_affinode.slurm.client import examine as examine_access
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.interface import Runner, complaint
from slurm_affinode.slurm.pyslurm_client import start_worker
from slurm_affinode.slurm.times import zone_name

_TIMEOUT_S = 30.0


def check_slurm(backend: str, run: Runner, start: Callable[[], Helper]) -> list[Check]:
    """Run the checks of the live Slurm, in order of dependency. Raises nothing."""
    commands, pyslurm = examine_access(run, start)
    if not commands.usable:
        if backend == "pyslurm" or "no such program" not in (commands.reason or ""):
            return [Check("Slurm", UNREACHABLE, commands.reason or "", commands.hint)]
        return [Check("Slurm", SKIPPED, f"not on this machine ({commands.reason})")]
    return [
        Check("Slurm", OK, f"version {commands.version}"),
        *known_hole_checks("Slurm", known_holes.version_in(commands.version or "")),
        *known_hole_checks("munge", _munge_version(run)),
        _backend(backend, commands, pyslurm),
        _controller(run, commands.version),
        _database(run),
    ]


def known_hole_checks(program: str, version: str) -> list[Check]:
    """Return a check for a release with known security holes, or with holes that its number neither shows nor excludes.

    ``version``: three numbers, as in ``26.05.5``; empty if the program is not here.
    """
    table = known_holes.load()
    verdicts = table.of(program, version) if version else []
    checks = []
    for verdict, status, what in (
        (HoleFinding.AFFECTED, PROBLEM, "has known security holes"),
        (HoleFinding.UNKNOWN, SKIPPED, "may have known security holes"),
    ):
        holes = [hole for hole, hole_verdict in verdicts if hole_verdict is verdict]
        if not holes:
            continue
        hole_list = "; ".join(f"{hole.name} ({hole.date}): {hole.about}" for hole in holes)
        fixes = "; ".join(f"{hole.name}: {', '.join(hole.fixed)}, {hole.source}" for hole in holes)
        advice = (
            f"update {program}"
            if verdict is HoleFinding.AFFECTED
            else f"see the changelog of your package of {program}"
        )
        name = f"{program} security" if status == PROBLEM else f"{program} security, unknown"
        detail = f"{version} {what} (as of {table.as_of}): {hole_list}"
        checks.append(Check(name, status, detail, f"{advice}; fixed in {fixes}"))
    return checks


def _munge_version(run: Runner) -> str:
    try:
        completed = run(["munge", "--version"], timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError:
        return ""
    return known_holes.version_in(completed.stdout.decode("utf-8", "replace"))


_FILES = (
    "cron.d/slurm-affinode", "cron.d/slurm-affinode-zombies", "systemd/slurm-affinode-nightly.service",
    "systemd/slurm-affinode-zombies.service", "systemd/slurm-affinode-agent.service",
)  # fmt: skip
_PATH = re.compile(r'^(?:Environment=)?"?PATH=([^"\n]+)', re.MULTILINE)


def services(bin_dir: Path | None, etc: Path = Path("/etc")) -> Check:
    """Check that cron jobs and systemd units find Slurm's commands on their own ``PATH``, not the caller's."""
    missing: dict[str, list[str]] = {}
    for file, places in _service_paths(etc):
        for command in process.SLURM_COMMANDS:
            if not _on_path(command, [*([] if bin_dir is None else [str(bin_dir)]), *places.split(":")]):
                missing.setdefault(command, []).append(file.name)
    if not missing:
        return Check("services", OK, "Slurm's commands are found with the PATH of the services")
    files = sorted({file for files_of_command in missing.values() for file in files_of_command})
    detail = f"not found with the PATH of {', '.join(files)}: {', '.join(missing)}"
    program_path = next((Path(program) for command in missing if (program := shutil.which(command))), None)
    if program_path is not None and (loose := process.replaceable(program_path)) is not None:
        return Check("services", PROBLEM, detail, f"root does not run {program_path}: others may write to {loose}")
    if program_path is not None:
        return Check("services", PROBLEM, detail, f'set slurm.bin_dir = "{program_path.parent}" in the configuration')
    hint = "set slurm.bin_dir in the configuration to the directory that has them"
    return Check("services", SKIPPED if bin_dir is None else PROBLEM, detail, hint)


def _service_paths(etc: Path) -> Iterator[tuple[Path, str]]:
    """Yield each installed cron or unit file (if none is installed, the shipped ones) with its ``PATH``."""
    places = [etc / name.replace("systemd/", "systemd/system/") for name in _FILES]
    installed = [place for place in places if place.is_file()]
    for file in installed or [asset_dir("reports") / name for name in _FILES]:
        texts = [part.read_text(encoding="utf-8", errors="replace") for part in (file, *_drop_ins(file))]
        values = [path for text in texts for path in _PATH.findall(text)]
        yield file, values[-1].strip() if values else "/usr/bin:/bin"


def _drop_ins(file: Path) -> list[Path]:
    return sorted(file.with_name(f"{file.name}.d").glob("*.conf"))


def _on_path(command: str, places: Sequence[str]) -> bool:
    """Return whether one of the directories has the program, and root would run it."""
    for place in places:
        with contextlib.suppress(OSError):
            path = Path(place) / command
            if os.access(path, os.X_OK) and process.replaceable(path) is None:
                return True
    return False


def _backend(requested: str, commands: Availability, pyslurm: Availability) -> Check:
    used = pyslurm if pyslurm.usable and requested != "commands" else commands
    if requested == "pyslurm" and not pyslurm.usable:
        detail = f"pyslurm was requested and cannot be used: {pyslurm.reason}"
        return Check("Slurm backend", PROBLEM, detail, pyslurm.hint)
    notes = [
        f"{availability.backend} {availability.version or ''}".strip()
        + (": available" if availability.usable else f": not usable: {availability.reason}")
        for availability in (pyslurm, commands)
    ]
    return Check("Slurm backend", OK, f"{used.backend} ({requested} was requested); {'; '.join(notes)}")


def _controller(run: Runner, version: str | None) -> Check:
    client = CommandsClient(run, timeout_s=_TIMEOUT_S)
    try:
        client.ping()
        server_release = client.config().get("SLURM_VERSION")
    except AffinodeError as error:
        return Check("slurmctld", UNREACHABLE, str(error), error.hint)
    if server_release and scontrol.release(server_release) != scontrol.release(version):
        return Check("slurmctld", OK, f"responds; it runs Slurm {server_release}, the commands here are of {version}")
    return Check("slurmctld", OK, "answers")


def _database(run: Runner) -> Check:
    hint = "is slurmdbd running, and may this user ask it? try: sacctmgr show cluster"
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=cluster"]
    try:
        completed = run(argv, timeout_s=_TIMEOUT_S, check=False)
    except AffinodeError as error:
        return Check("slurmdbd", UNREACHABLE, str(error), error.hint)
    if completed.returncode != 0:
        return Check("slurmdbd", UNREACHABLE, f"does not respond: {complaint(completed)}", hint)
    names = completed.stdout.decode("utf-8", "replace").split()
    return Check("slurmdbd", OK, f"responds; clusters: {', '.join(names) or '(none)'}")


_GRES = re.compile(r"^GresTypes\s*=\s*(.*?)\s*$", re.MULTILINE)
_TRES = re.compile(r"^AccountingStorageTRES\s*=\s*(.*?)\s*$", re.MULTILINE)


def exit_code(checks: Iterable[Check]) -> int:
    """Return the exit status: 0 no problem, 1 problems found, 3 something does not respond."""
    statuses = {check.status for check in checks}
    if UNREACHABLE in statuses:
        return 3
    return 1 if PROBLEM in statuses else 0


def examine(
    config: Config,
    *,
    now: datetime,
    run: Runner = run_program,
    start: Callable[[], Helper] = start_worker,
    etc: Path = Path("/etc"),
) -> list[Check]:
    """Run all checks, in order of dependency.

    ``start`` starts the process in which pyslurm runs; ``etc`` is the directory with cron and unit files.
    """
    checks: list[Check] = []
    checks += guarded("configuration", lambda: [check_configuration(config)])
    checks += guarded("time zone", lambda: [_zone(config)])
    if missing := extras.missing():
        checks += _live(config, run, start, etc)
        detail = f"database, GPU metrics, sacct, reports: the extra analysis is not installed ({', '.join(missing)})"
        checks.append(Check("not checked", SKIPPED, detail, f"if this machine makes reports: {extras.INSTALL}"))
    else:
        from slurm_affinode.pipeline import data_checks  # noqa: PLC0415 - not on nodes

        checks += data_checks.examine(config, now)
        checks += _live(config, run, start, etc)
        if config.nightly.accounting_paths:
            checks.append(Check("sacct", SKIPPED, "accounting comes from files (nightly.accounting_paths)"))
        else:
            checks += guarded("sacct", lambda: [_sacct(run)])
            checks += guarded("GPU accounting", lambda: [_tracking(run)])
        checks += guarded("reports", lambda: [data_checks.directory("reports", config.reports_dir)])
    if config.suspend.shared_store is not None:
        checks.append(tracing())
        checks += guarded("GPU shares", lambda: [shares(run)])
        if device_files.majors():
            checks.append(forked_workers(config.suspend.criu_plugin))
    return checks


def _live(config: Config, run: Runner, start: Callable[[], Helper], etc: Path) -> list[Check]:
    checks = guarded("Slurm", lambda: check_slurm(config.slurm.backend, run, start))
    return checks + guarded("services", lambda: [services(config.slurm.bin_dir, etc)])


def tracing(sysctl: Path = yama.SYSCTL) -> Check:
    """Check whether a user's processes can trace processes that are being restored."""
    scope = yama.scope(sysctl)
    statuses = {yama.PtraceVerdict.SOUND: OK, yama.PtraceVerdict.ADVISED: SKIPPED, yama.PtraceVerdict.REFUSED: PROBLEM}
    return Check("process tracing", statuses[yama.judge(scope)], yama.describe(scope), yama.hint(scope))


def forked_workers(plugin: Path) -> Check:
    """Check whether jobs whose processes have forked workers, such as data loaders, can be suspended."""
    try:
        with device_files.opened(plugin):
            return Check("forked workers", OK, f"can be suspended with the CRIU plugin {plugin}")
    except UnreachableError as error:
        return Check("forked workers", PROBLEM, str(error), error.hint)


def check_configuration(config: Config) -> Check:
    """Check the files that a configuration names: aliases, prices, emissions. Raises ``ConfigError``."""
    if not extras.missing():
        from slurm_affinode.metrics import aliases  # noqa: PLC0415

        aliases.load(config.gpu_history.aliases, config.gpu_history.columns)
    prices.load(config.price.table, currency=config.price.currency)
    emissions.load(config.emissions)
    return Check("configuration", OK, str(config.source) if config.source else "no file: the defaults")


def _zone(config: Config) -> Check:
    name = zone_name(config.cluster.timezone)
    return Check("time zone", OK, name if config.cluster.timezone else f"{name} (of this machine)")


def _sacct(run: Runner) -> Check:
    fields = sacct_command.sacct_fields(run)
    # A cheap query: the current cluster's jobs of a single moment.
    completed = run(["sacct", "-n", "-X", "-S", "now", "-E", "now", "-o", "JobID"], timeout_s=_TIMEOUT_S, check=False)
    if completed.returncode != 0:
        hint = "is slurmdbd running? sacctmgr show cluster"
        return Check("sacct", UNREACHABLE, f"does not respond: {complaint(completed)}", hint)
    return Check("sacct", OK, f"answers, {len(fields)} fields of use")


def _tracking(run: Runner) -> Check:
    try:
        completed = run(["scontrol", "show", "config"], timeout_s=_TIMEOUT_S)
    except UnreachableError as error:
        return Check("GPU accounting", SKIPPED, f"AccountingStorageTRES could not be read: {error}")
    match = _TRES.search(completed.stdout.decode("utf-8", "replace"))
    tracked = [word for word in (match[1] if match else "").split(",") if word]
    if any(word.lower() == "gres/gpu" for word in tracked):
        return Check("GPU accounting", OK, f"AccountingStorageTRES={','.join(tracked)}")
    typed = [word for word in tracked if word.lower().startswith("gres/gpu:")]
    needed = ",".join(["gres/gpu", *typed])
    return Check(
        "GPU accounting",
        PROBLEM,
        f"AccountingStorageTRES={','.join(tracked) or '(nothing)'}: "
        "there are no GPU counts in accounting without gres/gpu",
        f"set AccountingStorageTRES={needed} in slurm.conf (needs slurmdbd) and restart slurmctld; "
        "earlier jobs have no GPU count",
    )


def shares(run: Runner) -> Check:
    """Check whether jobs can have shares of GPUs: without them, a sleep in place frees no memory for other jobs."""
    exclusive = (
        "jobs with mode=inplace count as jobs with whole GPUs, whose memory no other job can use while they sleep"
    )
    try:
        completed = run(["scontrol", "show", "config"], timeout_s=_TIMEOUT_S)
    except UnreachableError as error:
        return Check("GPU shares", SKIPPED, f"GresTypes could not be read: {error}; {exclusive}")
    match = _GRES.search(completed.stdout.decode("utf-8", "replace"))
    types = [word for word in (match[1] if match else "").split(",") if word and word != "(null)"]
    if {"shard", "mps"} & set(types):
        return Check("GPU shares", OK, f"GresTypes={','.join(types)}: jobs with shares of GPUs can sleep in place")
    return Check(
        "GPU shares", SKIPPED, f"GresTypes={','.join(types) or '(nothing)'}: {exclusive}",
        "add shard to GresTypes in slurm.conf and the shards to gres.conf, where mode=inplace is to be used; or set "
        "modes=requeue in plugstack.conf",
    )  # fmt: skip
