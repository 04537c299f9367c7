"""Addresses of pages that the pages of a report link to, only of those that exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from slurm_affinode.report.measures import Row

JobKey = tuple[str, int, datetime]
"""Cluster, raw job ID, submit time."""


@dataclass(frozen=True, slots=True)
class Links:
    """Names and jobs with their addresses, URL-encoded, relative to the page or absolute."""

    jobs: Mapping[JobKey, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    accounts: Mapping[str, str] = field(default_factory=dict)

    def job(self, row: Row) -> str:
        """Return the address of the page of a run; empty if there is none.

        A row without ``submit`` names the last attempt of the job.
        """
        if not self.jobs:
            return ""
        if "submit" in row:
            return self.jobs.get((row["cluster"], row["job_id"], row["submit"]), "")
        same = [key for key in self.jobs if key[:2] == (row["cluster"], row["job_id"])]
        return self.jobs[max(same)] if same else ""

    def user(self, name: str | None) -> str:
        """Return the address of the page of a user; empty if there is none."""
        return self.users.get(name or "", "")

    def account(self, name: str | None) -> str:
        """Return the address of the page of an account; empty if there is none."""
        return self.accounts.get(name or "", "")


NO_LINKS = Links()
