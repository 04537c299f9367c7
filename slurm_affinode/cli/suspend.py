"""``slurm-affinode suspend`` and ``slurm-affinode wake``."""

from __future__ import annotations

import time
from typing import Any

import click

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.agent.reach import Reach
from slurm_affinode.cli.nodeoptions import config_file
from slurm_affinode.cli.options import json_option, print_json, printable, stages
from slurm_affinode.cli.reaching import reach_of
from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.suspension import Mode
from slurm_affinode.timespec import parse_span_s

POLL_S = 0.5
LOST_S = 30.0
"""Between the end of the run and the image's place in the list of suspended jobs; then the job counts as ended."""
_ON_THE_WAY = ("unknown-job", "not-opted-in", "ending", "under-way", "too-often")
"""What an agent may say of it meanwhile."""

_SUSPEND_EPILOG = """\b
  slurm-affinode suspend 123
  slurm-affinode suspend 123 --no-wait

\b
Exit status: 0 suspended (--no-wait: begun), 1 refused or failed, and the job runs on, 3 no agent answers.
"""

_WAKE_EPILOG = """\b
  slurm-affinode wake 123

\b
Exit status: 0 released, or as soon as its image is in the shared store; 1 refused; 3 no agent answers.
"""


@click.command(epilog=_SUSPEND_EPILOG)
@click.argument("job")
@click.option("--no-wait", is_flag=True, help="Return when it has begun.")
@click.option("--force", is_flag=True, help="Skip minimum run time and backoff (administrators only).")
@click.option("--timeout", metavar="SPAN", default="1h", show_default=True, help="Wait so long; it goes on by itself.")
@json_option
@config_file
def suspend(*, config: Config, job: str, no_wait: bool, force: bool, timeout: str, as_json: bool) -> int:
    """Suspend a job now, idle or not: checkpoint it, put it back into the queue, give its GPUs to others.

    One with mode=inplace keeps its allocation: its GPU memory goes to host memory, its processes are frozen.
    For its owner and for administrators. The job has to have been submitted with --gpu-suspend-idle. What cannot be
    suspended is refused with the reason before anything is touched, and a suspension that fails leaves it running.

    The site's suspend.min_run and suspend.backoff hold here, too: a run that is too short, or whose suspension was
    requested just before, is refused (min-run, backoff). Administrators may skip both with --force. Other rules of the
    policy do not apply.
    """
    timeout_s = parse_span_s(timeout)
    with reach_of(config) as reach:
        before = time.time() - 1  # an agent of an older version does not say when it began
        answer = reach.about(job, {"verb": "suspend", "force": True} if force else {"verb": "suspend"})
        if not no_wait:
            with stages() as stage:
                stage(f"suspending job {job}")
                answer = {**answer, "job": _wait(reach, job, answer.get("at", before), timeout_s)}
    if as_json:
        print_json(answer)
    elif no_wait:
        click.echo(f"Job {job} is being suspended; see: slurm-affinode status {job}")
    elif answer["job"]["state"] == "watched":
        click.echo(f"Job {job} slept in place, and runs again: {printable(answer['job']['last']['text'])}")
    elif answer["job"]["state"] != "suspended":
        asked = (answer["job"].get("in_place") or {}).get("wakes_on_request")
        wakes = "it wakes on a request, or with" if asked else "wake it with"
        click.echo(f"Job {job} sleeps in place; {wakes}: slurm-affinode wake {job}")
    else:
        click.echo(f"Job {job} is suspended; wake it with: slurm-affinode wake {job}")
    return 0


def _wait(reach: Reach, job: str, began: float, timeout_s: float) -> dict[str, Any]:
    """The job's status once it is suspended. Raises ``AffinodeError`` where it is not going to be.

    ``began``: when the agent took the request, by its own clock; this machine's may be another.
    """
    deadline, seen = time.monotonic() + timeout_s, time.monotonic()
    while time.monotonic() < deadline:
        try:
            row: dict[str, Any] = reach.about(job, {"verb": "status"})["jobs"][0]
        except AnswerError as error:
            if error.code not in _ON_THE_WAY or time.monotonic() - seen > LOST_S:
                raise
        else:
            seen = time.monotonic()
            if row["state"] in ("suspended", "asleep", "waking"):
                return row
            last = row["last"]
            if row["state"] == "watched" and last is not None and last["at"] >= began:
                if not last["done"]:
                    raise AnswerError("failed", f"job {job}: {last['text']}", hint=None, exit_code=1)
                if row["option"]["mode"] == Mode.INPLACE.value:  # somebody asked something of it: it is awake again
                    return row
        time.sleep(POLL_S)
    raise AffinodeError(
        f"job {job} is not suspended after {timeout_s:g} s; it goes on by itself",
        hint=f"see: slurm-affinode status {job}",
    )


@click.command(epilog=_WAKE_EPILOG)
@click.argument("job")
@json_option
@config_file
def wake(*, config: Config, job: str, as_json: bool) -> int:
    """Let a suspended job go on: it starts again, from its image, when Slurm has GPUs for it.

    One that sleeps in place goes on as soon as there is room for its memory on its GPUs.

    For its owner and for administrators. Twice is as once.
    """
    with reach_of(config) as reach:
        answer = reach.about(job, {"verb": "wake"})
    if as_json:
        print_json(answer)
    elif answer.get("in_place"):
        click.echo(f"Job {job} wakes as soon as there is room for it on its GPUs; see: slurm-affinode status {job}")
    elif answer.get("released", True):
        click.echo(f"Job {job} is released: it goes on when Slurm has GPUs for it")
    else:
        click.echo(f"Job {job} will be released when it is in the queue and its image in the shared store")
        click.echo(f"  see: slurm-affinode status {job}", err=True)
    return 0
