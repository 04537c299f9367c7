"""Looking at a tree whose files may be on a file system that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_affinode.checkpoint.facts import TreeFacts, collect
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.patience import NoAnswerError, Patience
from slurm_affinode.pinned import Id, Process


class Looker:
    """``collect``, given up where it takes too long. May be used by several threads."""

    def __init__(self, look: Callable[[int, int], TreeFacts] = collect, *, limit_s: float = 20.0) -> None:
        """``limit_s``: seconds for one look."""
        self._look, self._limit_s = look, limit_s
        self._silent: dict[Id, Patience] = {}
        self._lock = threading.Lock()

    def __call__(self, init_pid: int, root_pid: int) -> TreeFacts:
        """As ``collect``. Raises ``CheckpointError`` where a file that the tree has open keeps that from coming to an
        end, and then at once until it has: the other jobs do not wait for this one.
        """
        try:
            with Process(init_pid) as process:
                init = process.id
        except OSError:
            return TreeFacts(init_pid, root_pid, ())
        with self._lock:
            self._silent = {known: one for known, one in self._silent.items() if one.silent}
            patience = self._silent.get(init) or Patience(None, look_s=self._limit_s)
        try:
            return patience(lambda: self._look(init_pid, root_pid))
        except NoAnswerError:
            with self._lock:
                self._silent[init] = patience
            raise CheckpointError("it has files open, or memory mapped, that nothing can be said of now") from None
