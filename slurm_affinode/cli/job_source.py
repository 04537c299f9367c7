"""Summaries of jobs from the site's database, from published files, from live data, or from Slurm's accounting."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, NoStoreError, UnreachableError
from slurm_affinode.cli.zombies import explained_to_owner, prometheus_history
from slurm_affinode.model.job_summary import JobSummary
from slurm_affinode.pipeline import job_files
from slurm_affinode.slurm.client import open_client
from slurm_affinode.zombies import job as summaries
from slurm_affinode.zombies.explain import NoAttemptError
from slurm_affinode.zombies.find import Request
from slurm_affinode.zombies.nodes import asker
from slurm_affinode.zombies.sampling import NodeSampler


def summary(
    config: Config, job_id: str, cluster: str | None, attempt: int | None, step: Callable[[str], None]
) -> JobSummary:
    """Return the summary from the first source that has the job: the database, the published summaries, live data,
    Slurm's accounting.
    """
    slurm = functools.partial(open_client, config.slurm.backend)  # type: ignore[arg-type]
    directory = config.nightly.jobs.directory
    step("reading accounting and GPU metrics")
    try:
        return summaries.summarize(config, job_id, cluster=cluster, attempt=attempt, slurm=slurm)
    except NoAttemptError as error:
        reason: AffinodeError = error
    except (NoStoreError, UnreachableError) as error:
        reason = error
        if directory is None:
            reason.hint = (
                reason.hint or "the site can publish summaries of jobs to their owners: nightly.jobs.directory"
            )
        else:
            try:
                return job_files.read(directory, job_id, cluster=cluster, attempt=attempt)
            except job_files.NoSummaryError as missing:
                reason = missing
    if attempt in (None, -1):
        try:
            history = prometheus_history(config, Request(), step) if config.prometheus.url else None
            live = summaries.summarize_live(
                config, job_id, NodeSampler(asker(config), say=step), slurm=slurm, history=history
            )
        except AffinodeError as error:
            reason = explained_to_owner(config, reason, error)
        else:
            return _permitted(live, job_id)
    step("querying sacct")
    try:
        ended = summaries.summarize_accounting(config, job_id, cluster=cluster, attempt=attempt, slurm=slurm)
    except UnreachableError:
        raise reason from None
    if ended is None or ended.job.end is None:
        raise reason
    return ended


def _permitted(live: JobSummary, job_id: str) -> JobSummary:
    """Return a live summary. Raises ``NoAttemptError`` unless it is the user's own: agents answer everyone."""
    if os.geteuid() not in (0, live.uid):
        raise NoAttemptError(
            f"job {job_id} belongs to {live.user or 'another user'}",
            hint="users who may not read the site's database see their own jobs",
        )
    return live
