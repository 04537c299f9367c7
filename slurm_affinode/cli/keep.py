"""``slurm-affinode keep``."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import click

from slurm_affinode.base import extras
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import span
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import (
    Span,
    clock,
    config_options,
    echo,
    json_option,
    print_json,
    slurm_options,
    warn,
    zone,
)
from slurm_affinode.model.cleanup import Keep, Policy
from slurm_affinode.model.cluster import Job
from slurm_affinode.slurm.client import open_client
from slurm_affinode.zombies import exemptions
from slurm_affinode.zombies import policy as site_policy

_KEEP_EPILOG = """\b
Examples:
  slurm-affinode keep 123 --for 2h --why "the debugger is attached, back after lunch"

\b
Exit status: 0 recorded, 1 rejected, 2 unusable input, 3 Slurm does not respond.
"""


@command(epilog=_KEEP_EPILOG)
@config_options
@slurm_options
@click.argument("job")
@click.option(
    "--for", "for_s", type=Span(60), required=True, metavar="SPAN", help="Exempt the job for SPAN from now on"
)
@click.option("--why", required=True, metavar="TEXT", help="State the reason to the administrators")
@json_option
def keep(*, config: Config, job: str, for_s: float, why: str, as_json: bool) -> int:
    """Exempt one of your jobs from clean-up for a while. Once per attempt of a job.

    The exemption is written into the job's comment, where the clean-up finds it.
    """
    now = datetime.now(UTC)
    policy = site_policy.load(config)
    exemption = exemptions.ExemptionRequest(now + timedelta(seconds=for_s), " ".join(why.split()))
    with open_client(config.slurm.backend, warned=warn) as slurm:  # type: ignore[arg-type]
        live_job = slurm.job(job)
        problem = _against(live_job, exemption, policy, now)
        if problem is not None:
            warn(f"job {live_job.id}: {problem}")
            return 1
        slurm.set_comment(live_job.id, exemptions.comment_with(live_job.comment, exemption))
        cluster = config.cluster.name or slurm.config().get("ClusterName") or "default"
    keep_ = Keep(
        cluster, live_job.job_id, live_job.submit or now, live_job.user or "?", exemption.why, now, exemption.until
    )
    written = _write(config, keep_, live_job.id, now)
    if as_json:
        print_json({"job": live_job.id, "until": exemption.until, "why": exemption.why, "written": written})
    else:
        echo(f"Job {live_job.id} is left alone for {span(for_s)}, until {clock(exemption.until)} ({zone()})")
    return 0


def _against(job: Job, exemption: exemptions.ExemptionRequest, policy: Policy, now: datetime) -> str | None:
    uid = os.getuid()
    if uid not in (0, job.uid):
        return "it is not yours"
    if not job.allocated:
        return f"it does not run: it is {job.state}"
    if exemptions.has_request(job):
        return "an exemption was requested before; only one is allowed for each attempt"
    try:
        exemptions.check(exemption, policy.keep, now)
    except AffinodeError as error:
        return str(error)
    return None


def _write(config: Config, exemption: Keep, job: str, now: datetime) -> bool:
    """Store the exemption in the database right away; ``False`` if this user may not write there."""
    if extras.missing():  # no database on this machine
        return False
    from slurm_affinode.db.audit import Who, ZombieLog  # noqa: PLC0415
    from slurm_affinode.db.repository import Repository  # noqa: PLC0415

    try:
        with Repository.open(config.db_url, create=False) as store:
            log = ZombieLog(store.engine)
            if log.keep(exemption) is None:
                who = Who.am_i()
                log.record([exemptions.record(exemption, job, who.run, who.actor, now)])
    except AffinodeError:
        return False
    return True
