"""``slurm-affinode suspend`` and ``slurm-affinode wake``."""

from __future__ import annotations

import time
from typing import Any

import click

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.agent.routing import Reach
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.cli.command import command
from slurm_affinode.cli.node_options import config_file, reach_of
from slurm_affinode.cli.options import echo, json_option, print_json, stages, warn
from slurm_affinode.model.suspension import Mode

POLL_S = 0.5
LOST_S = 30.0
"""Time from the end of the attempt until the job is listed as suspended; after that it is considered ended."""
_ON_THE_WAY = ("unknown-job", "not-opted-in", "starting", "ending", "under-way", "too-often")
"""Error codes that an agent may return during that time."""

_SUSPEND_EPILOG = """\b
  slurm-affinode suspend 123
  slurm-affinode suspend 123 --no-wait

\b
Exit status: 0 suspended (--no-wait: started), 1 refused or failed, the job continues, 3 no agent responds.
"""

_WAKE_EPILOG = """\b
  slurm-affinode wake 123
  slurm-affinode wake 123 --from-start   give up its image: its script starts from the beginning

\b
Exit status: 0 released, or will be when its image is in the shared store; 1 refused; 3 no agent responds.
"""


@command(epilog=_SUSPEND_EPILOG)
@click.argument("job")
@click.option("--no-wait", is_flag=True, help="Return as soon as the suspension has started")
@click.option("--force", is_flag=True, help="Skip minimum run time and backoff (administrators only)")
@click.option(
    "--timeout",
    metavar="SPAN",
    default="1h",
    show_default=True,
    help="Wait at most SPAN; the suspension continues by itself",
)
@json_option
@config_file
def suspend(*, config: Config, job: str, no_wait: bool, force: bool, timeout: str, as_json: bool) -> int:
    """Suspend a job now, idle or not: checkpoint it, requeue it, and release its GPUs.

    A job with mode=inplace keeps its allocation: its GPU memory moves to host memory, and its processes are frozen.
    For owners and administrators. The job must have been submitted with --gpu-suspend-idle. A job that cannot be
    suspended is refused with the reason before anything is changed, and a failed suspension leaves it running.

    suspend.min_run and suspend.backoff apply: a run that is too short, or was requested to suspend shortly before,
    is refused (min-run, backoff). Administrators may skip both with --force. Other rules of the policy do not
    apply.
    """
    timeout_s = parse_span_s(timeout)
    with reach_of(config) as reach:
        before = time.time() - 1  # older agents do not return the start time
        answer = reach.about(job, {"verb": "suspend", "force": True} if force else {"verb": "suspend"})
        if not no_wait:
            with stages() as stage:
                stage(f"suspending job {job}")
                answer = {**answer, "job": _wait(reach, job, answer.get("at", before), timeout_s)}
    if as_json:
        print_json(answer)
    elif no_wait:
        echo(f"Job {job} is being suspended; see: slurm-affinode status {job}")
    elif answer["job"]["state"] == "watched":
        echo(f"Job {job} slept in place, and runs again: {answer['job']['last']['text']}")
    elif answer["job"]["state"] != "suspended":
        on_request = (answer["job"].get("in_place") or {}).get("wakes_on_request")
        wakes = "it wakes on a request, or with" if on_request else "wake it with"
        echo(f"Job {job} sleeps in place; {wakes}: slurm-affinode wake {job}")
    else:
        echo(f"Job {job} is suspended; wake it with: slurm-affinode wake {job}")
    return 0


def _wait(reach: Reach, job: str, began: float, timeout_s: float) -> dict[str, Any]:
    """Wait until the job is suspended and return its status. Raises ``AffinodeError`` if the suspension fails.

    ``began``: when the agent accepted the request, by the agent's clock, which may differ from the local one.
    """
    deadline, last_contact = time.monotonic() + timeout_s, time.monotonic()
    while time.monotonic() < deadline:
        try:
            row: dict[str, Any] = reach.about(job, {"verb": "status"})["jobs"][0]
        except AnswerError as error:
            if error.code not in _ON_THE_WAY or time.monotonic() - last_contact > LOST_S:
                raise
        else:
            last_contact = time.monotonic()
            if row["state"] in ("suspended", "asleep", "waking"):
                return row
            last = row["last"]
            if row["state"] == "watched" and last is not None and last["at"] >= began:
                if not last["done"]:
                    raise AnswerError("failed", f"job {job}: {last['text']}", hint=None, exit_code=1)
                if row["option"]["mode"] == Mode.INPLACE.value:  # a request has already woken it
                    return row
        time.sleep(POLL_S)
    raise AffinodeError(
        f"job {job} is not suspended after {timeout_s:g} s; the suspension continues",
        hint=f"see: slurm-affinode status {job}",
    )


@command(epilog=_WAKE_EPILOG)
@click.argument("job")
@click.option("--from-start", is_flag=True, help="Give up its image: its script starts from the beginning")
@json_option
@config_file
def wake(*, config: Config, job: str, from_start: bool, as_json: bool) -> int:
    """Resume a suspended job: Slurm restores it from its checkpoint image when it has GPUs for it.

    A job asleep in place resumes as soon as its GPU memory fits on its GPUs again.

    For owners and administrators. Idempotent.
    """
    with reach_of(config) as reach:
        answer = reach.about(job, {"verb": "wake", "from_start": True} if from_start else {"verb": "wake"})
    if as_json:
        print_json(answer)
    elif answer.get("in_place"):
        echo(f"Job {job} wakes as soon as there is room for it on its GPUs; see: slurm-affinode status {job}")
    elif answer.get("released", True):
        echo(f"Job {job} is released: it resumes when Slurm has GPUs for it")
    else:
        echo(f"Job {job} will be released when it is in the queue and its image in the shared store")
        warn(f"  see: slurm-affinode status {job}")
    return 0
