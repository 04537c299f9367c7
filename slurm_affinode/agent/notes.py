"""Notes beside the images: what the nodes tell each other of a job that sleeps, and who restores it.

Small files in two directories beside the shared store, root's alone: ``asleep/CLUSTER.JOBID.json`` (why, since when,
why its last restore failed) and ``claims/CLUSTER.JOBID.RESTARTS`` (which shepherd restores this run: the first has it,
so an image is never put in place twice). An image is complete without its note.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from slurm_affinode.errors import AffinodeError
from slurm_affinode.files import fsync_dir, write_text
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.patience import NoAnswerError, Patience

_CLAIM = re.compile(r"(?P<job>[A-Za-z0-9_-]+\.\d+)\.\d+")

_STALE_S = 60.0
"""So long it counts who is alive."""

NO_NOTE = "its note is not beside the shared store: is that mounted, and can it be written?"
"""Of a job that sleeps."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is told of a job that sleeps."""

    cluster: str
    job_id: int
    submit: int
    """Of the run that was suspended."""
    restarts: int
    seq: int
    uid: int
    node: str
    began_ms: int
    since_epoch: float
    why: str
    gpus: int
    gpu_bytes: int
    image_bytes: int
    wake: str
    user: str | None = None
    shown: str | None = None
    """What its owner calls it: ``123_4`` for a task of an array; none where that is its number."""
    failure: str | None = None
    """Why its last restore failed."""
    trouble: str | None = None
    """What its image had trouble with; it can be restored all the same."""
    passed: str | None = None
    """Tiers that did not take its image when it was written, and why."""
    released_epoch: float | None = None
    given_up: bool = False
    """None of its images is to be restored any more: it starts from its beginning."""

    @property
    def key(self) -> JobKey:
        """Of the run that was suspended."""
        return JobKey(self.cluster, self.job_id, self.submit)

    @property
    def problem(self) -> str | None:
        """Why its last restore failed, and what has become of its image since, one line."""
        trouble = "its image was given up: it starts from its beginning" if self.given_up else self.trouble
        if self.failure is None or trouble is None:
            return self.failure or trouble
        return trouble if self.failure in trouble else f"{self.failure}; {trouble}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where and when Slurm expects to start a job."""

    start_epoch: float
    nodes: tuple[str, ...]


class Notes:
    """The two directories; ``None``: there is no shared store, and nobody to tell.

    Where their file system does not answer it is as where it answers with errors.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._ask = Patience(root)

    def write(self, note: Note) -> None:
        """Put a note in place of an earlier one of the job. Raises ``AffinodeError``."""
        if self._root is None:
            return
        path = _file(self._root, note.cluster, note.job_id)

        def put() -> None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(path, json.dumps(asdict(note)) + "\n", mode=0o600)

        try:
            self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be written: {error.strerror or error}") from error

    def read(self, cluster: str, job_id: int) -> Note | None:
        """The note of a job; ``None`` where there is none that can be read."""
        if self._root is None:
            return None
        path = _file(self._root, cluster, job_id)
        with contextlib.suppress(OSError):
            return self._ask(lambda: _note(path))
        return None

    def all(self) -> list[Note]:
        """Every note, by job."""
        if self._root is None:
            return []
        found: list[Note] = []
        asleep = self._root / "asleep"
        with contextlib.suppress(OSError):
            found = self._ask(lambda: [note for path in asleep.glob("*.json") if (note := _note(path)) is not None])
        return sorted(found, key=lambda note: note.key)

    def remove(self, cluster: str, job_id: int) -> None:
        """The job is awake, or over."""
        if self._root is not None:
            path = _file(self._root, cluster, job_id)
            with contextlib.suppress(OSError):
                self._ask(lambda: path.unlink(missing_ok=True))

    # --- what Slurm plans

    def write_plan(self, plans: Mapping[int, Plan]) -> None:
        """Where and when jobs that were released are expected to start: one agent asks Slurm, all read it."""
        if self._root is not None:
            path = self._root / "plan.json"
            text = json.dumps({job: [one.start_epoch, list(one.nodes)] for job, one in sorted(plans.items())})
            try:
                self._ask(lambda: write_text(path, text + "\n", mode=0o600))
            except OSError as error:
                raise AffinodeError(f"{self._root}: cannot be written: {error.strerror or error}") from error

    def plan(self) -> dict[int, Plan]:
        """See ``write_plan``; empty where there is none that can be read."""
        if self._root is None:
            return {}
        path = self._root / "plan.json"
        try:
            value = json.loads(self._ask(lambda: path.read_text(encoding="utf-8")))
            return {
                int(job): Plan(float(start), tuple(str(node) for node in nodes))
                for job, (start, nodes) in value.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    # --- claims

    def claim(self, cluster: str, job_id: int, restarts: int, who: str) -> str | None:
        """Claim the restore of a run for ``who``; ``None``: it is his, also again. Else who has it.

        Raises ``AffinodeError`` where that cannot be found out, ``NoAnswerError`` where nobody answers.
        """
        if self._root is None:
            return None
        path = self._root / "claims" / f"{cluster}.{job_id}.{restarts}"
        try:
            return self._ask(lambda: _claim(path, who))
        except NoAnswerError:
            raise
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be claimed: {error.strerror or error}") from error

    def unclaim(self, live: Iterable[tuple[str, int]]) -> None:
        """Remove the claims of all jobs but these (cluster, job id)."""
        if self._root is None:
            return
        names = {f"{cluster}.{job_id}" for cluster, job_id in live}
        claims, asked = self._root / "claims", time.monotonic()

        def remove() -> None:
            for path in claims.iterdir():
                match = _CLAIM.fullmatch(path.name)
                if time.monotonic() - asked > _STALE_S:
                    return  # others may have claimed meanwhile
                if match is not None and match["job"] not in names:
                    path.unlink(missing_ok=True)

        with contextlib.suppress(OSError):
            self._ask(remove)


def _claim(path: Path, who: str) -> str | None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{who.replace('/', '_')}")
    draft.write_text(who)
    try:
        # A link appears whole or not at all, also for other clients of a network file system.
        os.link(draft, path)
        fsync_dir(path.parent)
    except FileExistsError:
        there = path.read_text()
        return None if there == who else there
    finally:
        draft.unlink(missing_ok=True)
    return None


def _file(root: Path, cluster: str, job_id: int) -> Path:
    return root / "asleep" / f"{cluster}.{job_id}.json"


def _note(path: Path) -> Note | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Note)}
        facts: Mapping[str, Any] = {name: one for name, one in value.items() if name in known}
        return Note(**facts)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
