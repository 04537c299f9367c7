"""Keeps the tiers in order: images come before their jobs do, and leave where host memory is short.

Which jobs are about to start here is Slurm's own plan (expected start and planned nodes of a released job), for which
one agent asks Slurm for all, see ``waker``. Images are read past the page cache, within ``pull_rate``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from slurm_affinode import jsonvalues
from slurm_affinode.agent.notes import Note
from slurm_affinode.agent.parts import Parts
from slurm_affinode.checkpoint.demand import SharedDemand
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged
from slurm_affinode.checkpoint.tier import Copy
from slurm_affinode.errors import AffinodeError
from slurm_affinode.files import write_text
from slurm_affinode.model.suspension import JobKey, LiveRun

_MEND_S = 60.0
_SAVE_S = 60.0


class Prefetcher:
    """One for the agent. One image at a time."""

    def __init__(self, parts: Parts, ahead_s: float, state: Path | None) -> None:
        """``ahead_s``: so long before the expected start; 0: never. ``state``: the file for what is learned."""
        self._parts = parts
        self._ahead_s = ahead_s
        self._state = state
        self._saved = 0.0
        self._looked: set[tuple[JobKey, str | None]] = set()
        self._bad: set[tuple[str, int]] = set()
        self._thread: threading.Thread | None = None

    def tick(self) -> None:
        """Look at what is to be done; long work goes on in a thread. Must not raise."""
        parts = self._parts
        try:
            parts.tiers.relieve()
            self._save()
            if self._thread is not None and self._thread.is_alive():
                return
            notes = [note for note in parts.notes.all() if note.cluster == parts.cluster and not note.given_up]
            work = [*self._to_mend(notes), *self._to_bring(notes)]
            if work:
                self._thread = threading.Thread(target=self._run, args=(work,), name="prefetch", daemon=True)
                self._thread.start()
        except (AffinodeError, OSError) as error:
            parts.log.warning("images ahead of their jobs: %s", error)

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, work: Sequence[Callable[[], bool]]) -> None:
        """The first piece of work that there is something to do for; what has failed is none."""
        for one in work:
            try:
                if one():
                    return
            except (AffinodeError, OSError) as error:
                self._parts.log.warning("images ahead of their jobs: %s", error)

    def _to_mend(self, notes: Sequence[Note]) -> Iterator[Callable[[], bool]]:
        """An image of this node that the shared tier has lost, or never had, or that could not be restored from it."""
        parts = self._parts
        shared = parts.tiers.shared
        if shared is None:
            return
        for note in notes:
            late = parts.now() - note.since_epoch > _MEND_S
            if note.node != parts.node or not late or parts.tiers.on_node(note.key.name, note.seq) is None:
                continue
            if shared.store.busy(note.key):  # it is on its way
                continue
            doubt = note.failure is not None and (note.key, note.failure) not in self._looked
            if doubt:
                self._looked.add((note.key, note.failure))
            try:
                shared.store.get(note.key.name, note.seq)
            except CheckpointError:
                doubt = True
            if doubt:
                yield partial(self._mend, note)

    def _mend(self, note: Note) -> bool:
        self._parts.tiers.mend(note.key.name, note.seq)
        return True

    def _to_bring(self, notes: Sequence[Note]) -> Iterator[Callable[[], bool]]:
        """Images of the jobs that start here next, as far as Slurm says."""
        parts = self._parts
        plans = parts.notes.plan() if self._ahead_s > 0 and notes else {}
        soon: list[tuple[float, Copy]] = []
        for note in notes:
            plan = plans.get(note.job_id)
            if plan is None or parts.node not in plan.nodes or plan.start_epoch - parts.now() > self._ahead_s:
                continue
            # The run that comes, as far as it has to be known to say whose image it takes.
            copies, _ = parts.tiers.copies(LiveRun(note.key, note.uid, note.restarts + 1))
            if copies and copies[0].tier is not parts.tiers.tiers[0] and copies[0].id not in self._bad:
                soon.append((plan.start_epoch - parts.now(), copies[0]))
        return (partial(self._bring, copy, max(left_s, 1.0)) for left_s, copy in sorted(soon, key=lambda one: one[0]))

    def _bring(self, copy: Copy, expected_s: float) -> bool:
        tiers = self._parts.tiers
        try:
            return tiers.pull(copy, expected_s=expected_s) is not None
        except ImageDamaged as error:  # it would be read to that place again and again
            self._bad.add(copy.id)
            tiers.report(copy.image.manifest.key, f"its copy in the tier {copy.tier.name} is damaged: {error}")
            return False

    # --- what was learned

    def _save(self) -> None:
        now = self._parts.now()
        if self._state is not None and not 0 <= now - self._saved < _SAVE_S:
            self._saved = now
            write_text(self._state, json.dumps(self._parts.tiers.demand.state()) + "\n", mode=0o600)


def load_demand(path: Path) -> SharedDemand:
    """What was learned before; a new one where there is none that can be read."""
    with suppress(OSError, ValueError):
        return SharedDemand.restored(jsonvalues.loads(path.read_bytes()))
    return SharedDemand()
