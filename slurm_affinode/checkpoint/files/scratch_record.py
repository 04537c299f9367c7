"""Record of a node about the closed node-local files of a job (``scratch_files.py``), one file for each job.

The files that restores have created there, and when attempts ran there whose files have stayed on the node.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurm_affinode.base import files, json_values
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import one_line
from slurm_affinode.checkpoint.files.created_files import FileIdentity, RecordsOfJobs
from slurm_affinode.model.suspension import JobKey

LOG = logging.getLogger("slurm_affinode.agent")
_LIMIT = 64 << 20
_VERSION = 1


class RecordError(AffinodeError):
    """A record exists and cannot be read."""


@dataclass(frozen=True, slots=True)
class ScratchFacts:
    """The facts about one job."""

    uid: int
    submit: int
    periods: tuple[tuple[float, float], ...] = ()
    """Begin and end of the attempts whose files are still here, in epoch seconds."""
    required: str | None = None
    """The nodes, separated by commas, that it required before it was tied to one; ``None``: it was not tied."""
    created: Mapping[str, FileIdentity] = field(default_factory=dict)
    """Path -> the file that a restore of the job has created."""
    version: int = _VERSION


def _decoded(data: bytes) -> ScratchFacts:
    """Return the facts. Raises ``ValueError``."""
    if len(data) > _LIMIT:
        raise ValueError(f"it is larger than {_LIMIT} bytes")
    value = json_values.table(json_values.loads(data))
    if value.get("version", _VERSION) != _VERSION:
        raise ValueError("its version is unknown")
    return json_values.record(ScratchFacts, value, strict=False)


@dataclass(frozen=True, slots=True)
class ScratchRecord:
    """The record of one job."""

    path: Path
    uid: int
    """The user of the job."""
    submit: int
    """Its submit time, which Slurm moves forward with each requeue."""

    def read(self) -> ScratchFacts:
        """Return the facts; none if there is no record, or only of another job. Raises ``RecordError``."""
        empty = ScratchFacts(self.uid, self.submit)
        try:
            with self.path.open("rb") as file:
                facts = _decoded(file.read(_LIMIT + 1))
        except FileNotFoundError:
            return empty
        except (OSError, ValueError) as error:
            hint = "remove it if the job needs no files of its earlier attempts on this node"
            raise RecordError(f"{self.path}: cannot be read: {one_line(str(error))}", hint=hint) from None
        return facts if facts.uid == self.uid and facts.submit <= self.submit else empty

    def read_or_default(self) -> ScratchFacts:
        """Return the facts as ``read`` does, but none, with a warning, if the record cannot be read."""
        try:
            return self.read()
        except RecordError as error:
            LOG.warning("%s", error)
            return ScratchFacts(self.uid, self.submit)

    def write(self, changed: Callable[[ScratchFacts], ScratchFacts]) -> bool:
        """Change facts. Returns ``False``, with a warning, if that fails: a record that cannot be read is kept."""
        try:
            facts = changed(self.read())
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_text(self.path, json.dumps(asdict(facts)), mode=0o600)
        except RecordError as error:
            LOG.warning("%s", error)
            return False
        except OSError as error:
            LOG.warning("%s: cannot be written: %s", self.path, error.strerror or error)
            return False
        return True


class ScratchRecords(RecordsOfJobs):
    """The records of the closed node-local files of jobs."""

    def of(self, key: JobKey, uid: int) -> ScratchRecord:
        """Return the record of a job."""
        return ScratchRecord(self.path(key.job_id), uid, key.submit_epoch)
