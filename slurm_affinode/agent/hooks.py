"""Prolog and epilog of a node. They run for every job, so they import little and by default never fail the node.

They do without ``pathlib``, which imports the parser of URLs and with it that of network addresses.

slurmd calls them as root, with ``SLURM_JOB_ID``, ``SLURM_JOB_UID`` and, for a job with GPUs, ``SLURM_JOB_GPUS`` in the
environment. Source: Slurm's prolog and epilog guide.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from slurm_affinode.agent.client import ask_local
from slurm_affinode.base.errors import AffinodeError, ConfigError
from slurm_affinode.base.text import escaped

AGENT_S = 2.0
"""Timeout for the agent's reply: a job waits for its prolog."""
LEFTOVERS_S = 28.0
"""Timeout for processes that a job left on its GPUs to end; less than Slurm's PrologEpilogTimeout."""
LOCK_S = 5.0
"""Timeout for the lock of the job mapping."""
_DIGITS = 10
"""Of the largest job ID and UID."""
CONFIG = "/etc/slurm-affinode/config.toml"
"""``config.DEFAULT_PATH``, ``config.ENV_CONFIG`` and ``node_config.AgentConfig.run_dir``, without importing those."""
ENV_CONFIG = "SLURM_AFFINODE_CONFIG"
RUN_DIR = "/run/slurm-affinode"
PROLOG_S = 20.0
"""``node_config.InplaceConfig.prolog_timeout``."""


def main(which: str, config_path: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None) -> int:
    """Run the prolog or epilog (``which``) and return its exit status, which is 1 only with ``agent.strict_hooks``.

    Problems are reported on standard error, which slurmd writes to its log.
    """
    environ = os.environ if env is None else env
    strict = False
    try:
        settings = _settings(config_path, environ)
        strict = settings.get("strict_hooks") is True
        problems = run(which, settings, environ)
    except AffinodeError as error:
        problems = [str(error)]
    except Exception as error:
        # Whatever the error, the node stays in service.
        problems = [f"a fault of its own: {type(error).__name__}: {error}"]
    for problem in problems:
        print(escaped(f"slurm-affinode {which}: {problem}"), file=sys.stderr)
    return 1 if problems and strict else 0


def _settings(path: str | os.PathLike[str] | None, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the section ``[agent]`` as it is in the file; the agent has validated it. Raises ``ConfigError``.

    ``prolog_wakes`` is added if ``[inplace]`` enables waking of sleepers in the prolog.
    """
    requested = path or env.get(ENV_CONFIG) or None
    try:
        with open(requested or CONFIG, encoding="utf-8") as file:  # noqa: PTH123 - see above
            text = file.read()
    except FileNotFoundError:
        if requested is None:
            return {}
        raise ConfigError(f"{requested}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{requested or CONFIG}: cannot be read: {error}") from error
    import tomllib  # noqa: PLC0415 - only where there is something to read

    try:
        data = tomllib.loads(text)
        section = data.get("agent", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{requested or CONFIG}: {error}") from error
    settings = dict(section) if isinstance(section, dict) else {}
    inplace = data.get("inplace")
    if isinstance(inplace, dict) and inplace.get("wake_at_prolog") is True:
        settings["prolog_wakes"] = inplace.get("prolog_timeout", "")
    return settings


def run(which: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """Notify the agent and write the job mapping; return the problems. ``settings``: the section ``[agent]``."""
    job, uid = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_UID", "")
    if not (_is_number(job) and _is_number(uid)):
        return ["SLURM_JOB_ID and SLURM_JOB_UID are not set: it is for slurmd to call"]
    # MIG instances have no number of their own in SLURM_JOB_GPUS; the agent finds them by the processes on them.
    names = [word for word in env.get("SLURM_JOB_GPUS", "").split(",") if word]
    problems: list[str] = []
    if settings.get("job_map"):
        try:
            _map(which, str(settings["job_map"]), names, job)
        except (AffinodeError, ValueError) as error:
            problems.append(str(error))
    request: dict[str, object] = {"verb": which, "job": int(job), "uid": int(uid)}
    if names and all(map(_is_number, names)):
        request["gpus"] = [int(name) for name in names]
    try:
        ask_local(str(settings.get("run_dir", RUN_DIR)), request, timeout_s=AGENT_S)
    except AffinodeError as error:
        return [*problems, str(error)]
    if which == "prolog" and "gpus" in request and "prolog_wakes" in settings:
        problems += _wake(settings, request)
    # If the names are not numbers, the agent looks for the job's processes on all GPUs.
    return problems + (_leftovers(settings, {"gpus": [], **request}) if which == "epilog" and names else [])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def _wake(settings: Mapping[str, Any], request: Mapping[str, Any]) -> list[str]:
    """Have the agent wake jobs suspended in place on the job's GPUs; return those that still sleep."""
    from slurm_affinode.base.times import parse_span_s  # noqa: PLC0415 - only if it is needed

    run_dir = str(settings.get("run_dir", RUN_DIR))
    try:
        wait_s = parse_span_s(str(settings["prolog_wakes"])) if settings["prolog_wakes"] else PROLOG_S
        answer = ask_local(run_dir, {**request, "verb": "prolog-wakes"}, timeout_s=wait_s + AGENT_S)
    except AffinodeError as error:
        return [str(error)]
    return [f"job {job_id} still sleeps in place on its GPUs" for job_id in answer.get("asleep", ())]


def _leftovers(settings: Mapping[str, Any], request: Mapping[str, Any]) -> list[str]:
    """Have the agent end leftover processes of the job on its GPUs; print them and return the GPUs not free."""
    run_dir = str(settings.get("run_dir", RUN_DIR))
    try:
        report = ask_local(run_dir, {**request, "verb": "leftovers"}, timeout_s=LEFTOVERS_S)
    except AffinodeError as error:
        return [str(error)]
    for row in report.get("left", ()):
        outcome = row.get("ended_by") or "it does not end"
        text = f"slurm-affinode epilog: job {request['job']} left process {row.get('pid')} on a GPU: {outcome}"
        print(escaped(text), file=sys.stderr)
    # The reason of a drained node is already set: a failing epilog would replace it with Slurm's own.
    return [] if report.get("drained") else [str(row) for row in report.get("dirty", ())]


def _map(which: str, place: str, names: list[str], job: str) -> None:
    from pathlib import Path  # noqa: PLC0415 - only where it is written

    from slurm_affinode.gpu import jobs  # noqa: PLC0415

    directory = Path(place)
    if which == "epilog":
        jobs.remove(directory, job, lock_s=LOCK_S)
    elif names:
        jobs.add(directory, names, job, lock_s=LOCK_S)
