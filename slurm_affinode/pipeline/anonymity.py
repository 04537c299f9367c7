"""Reports without names: keyed, stable pseudonyms for users, accounts, names of jobs and, on request, nodes.

The names of partitions, QOS, clusters and GPU models stay, and so do job IDs and times: someone who knows the times of
some jobs of a user can recognize the pseudonym.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from slurm_affinode.analysis.result import UnmetDemand, WasteResult
from slurm_affinode.base import files
from slurm_affinode.base.errors import AffinodeError, InputError, unwritable
from slurm_affinode.core.pseudonyms import pseudonym

LEAST_KEY_BYTES = 16
KEY_NAME = "pseudonyms.key"
"""The key in the state directory, which the first anonymous report creates."""
_KINDS = {"user": "u", "account": "a", "node": "h"}
"""Column -> kind of its pseudonyms: those of users and accounts are as in an exported trace."""
_REMOVED = "(text removed)"


@dataclass(frozen=True, slots=True)
class Pseudonyms:
    """The pseudonyms of a site."""

    key: bytes
    nodes: bool = False
    """Whether nodes get pseudonyms as well."""

    @property
    def fingerprint(self) -> str:
        """Identifies key and mode, without the key."""
        return hashlib.sha256(repr((self.key, self.nodes)).encode()).hexdigest()[:16]

    def of(self, column: str, name: str) -> str:
        """Return the pseudonym of a name: ``column`` is ``user``, ``account`` or ``node``."""
        if column == "node" and not self.nodes:
            return name
        return pseudonym(self.key, _KINDS[column], name)

    def apply(self, result: WasteResult) -> WasteResult:
        """Return the result without names. Model servers and examples of data problems are left out."""
        query = result.query
        jobs = self._replaced(result.jobs, {"user": "user", "account": "account"})
        jobs = jobs.with_columns(self._job_names(result.jobs))
        if self.nodes:
            jobs = jobs.with_columns(pl.lit(None, pl.String).alias("node_list"))
        issues = tuple(replace(issue, examples=()) for issue in result.quality.issues)
        return replace(
            result,
            query=replace(
                query, users=tuple(self.of("user", name) for name in query.users),
                accounts=tuple(self.of("account", name) for name in query.accounts),
            ),
            jobs=jobs,
            groups={by: self._replaced(frame, {"name": by}) if by in _KINDS else frame
                    for by, frame in result.groups.items()},
            gpus=None if result.gpus is None else self._replaced(result.gpus, {"node": "node"}),
            demand=None if result.demand is None else self._demand(result.demand),
            suspensions=None if result.suspensions is None else self._suspensions(result.suspensions),
            quality=replace(result.quality, issues=issues), servers=None,
        )  # fmt: skip

    def _demand(self, demand: UnmetDemand) -> UnmetDemand:
        return replace(demand, holders=self._replaced(demand.holders, {"user": "user", "waiting_user": "user"}))

    def _suspensions(self, frame: pl.DataFrame) -> pl.DataFrame:
        columns = {"user": "user", "account": "account", "node": "node", "restored_node": "node"}
        # A failure names files and programs of the job.
        failure = pl.when(pl.col("failure").is_not_null()).then(pl.lit(_REMOVED)).alias("failure")
        return self._replaced(frame, columns).with_columns(failure)

    def _replaced(self, frame: pl.DataFrame, columns: Mapping[str, str]) -> pl.DataFrame:
        """Replace the names in columns of a frame: column -> what it names."""
        return frame.with_columns(
            frame[column]
            .replace_strict(
                names := frame[column].drop_nulls().unique().to_list(),
                [self.of(kind, name) for name in names],
                default=None,
                return_dtype=pl.String,
            )
            .alias(column)
            for column, kind in columns.items()
        )

    def _job_names(self, jobs: pl.DataFrame) -> pl.Series:
        """Return pseudonyms of users and names of jobs: the same for repeated jobs of a user."""
        pairs = jobs.select(pl.col("user").fill_null(""), "job_name").rows()
        pseudonyms = {
            (user, name): None if name is None else pseudonym(self.key, "n", user, name) for user, name in set(pairs)
        }
        return pl.Series("job_name", [pseudonyms[pair] for pair in pairs], pl.String)


Anonymize = Callable[[WasteResult], WasteResult]


def read_key(path: Path) -> bytes:
    """Return the key in a file. Raises ``AffinodeError`` unless it has ``LEAST_KEY_BYTES`` or more."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(key) < LEAST_KEY_BYTES:
        raise AffinodeError(
            f"{path} has {len(key)} bytes: a key has at least {LEAST_KEY_BYTES}",
            hint=f"make one: openssl rand -hex 32 > {path}",
        )
    return key


def site_key(state_dir: Path) -> bytes:
    """Return the key of a site, which is created if it is absent. Raises ``AffinodeError``."""
    path = state_dir / KEY_NAME
    if not path.exists():
        # A link appears complete, and only if no other process has made the key meanwhile.
        fresh = state_dir / f"{KEY_NAME}.{secrets.token_hex(4)}"
        try:
            files.write_text(fresh, secrets.token_hex(32) + "\n", mode=0o600)
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        except OSError as error:
            raise unwritable(path, error, hint="give the key of the pseudonyms with --pseudonym-key") from error
        finally:
            fresh.unlink(missing_ok=True)
    return read_key(path)
