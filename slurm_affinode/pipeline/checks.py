"""Results of the checks of ``doctor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurm_affinode.base.errors import AffinodeError, UnreachableError

OK, PROBLEM, UNREACHABLE, SKIPPED = "ok", "problem", "unreachable", "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: str
    """``ok``, ``problem``, ``unreachable`` or ``skipped`` (could not be checked, or does not apply)."""
    detail: str
    hint: str | None = None


def guarded(name: str, examine: Callable[[], list[Check]]) -> list[Check]:
    """Return the results of ``examine``, or its error as the result of the check ``name``."""
    try:
        return examine()
    except UnreachableError as error:
        return [Check(name, UNREACHABLE, str(error), error.hint)]
    except AffinodeError as error:
        return [Check(name, PROBLEM, str(error), error.hint)]
