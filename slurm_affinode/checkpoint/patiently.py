"""Methods of a store whose file system may not answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from slurm_affinode.checkpoint.interface import NoRoom
from slurm_affinode.patience import NoAnswerError, Patience


class Asked(Protocol):
    """What has such methods."""

    path: Path
    patience: Patience | None
    """``None``: its file system always answers."""


S = TypeVar("S", bound=Asked)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Patiently:
    """Makes a method raise ``NoAnswerError`` where the file system does not answer."""

    late: Callable[[Any], object] = lambda found: None
    """Gets what the method gives too late."""
    full: bool = False
    """It raises ``NoRoom`` in its place."""

    def __call__(self, method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        """The method."""

        @wraps(method)
        def asked(store: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if store.patience is None:
                return method(store, *args, **kwargs)
            try:
                found: R = store.patience(lambda: method(store, *args, **kwargs), self.late)
            except NoAnswerError as error:
                if self.full:
                    raise NoRoom(f"{store.path}: {error.strerror}") from None
                raise
            return found

        return asked
