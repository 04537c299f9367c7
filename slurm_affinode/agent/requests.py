"""Senders and refusals of requests to the agent."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_affinode.base.errors import AffinodeError


class RequestError(AffinodeError):
    """A refused request. ``code`` is machine-readable, ``exit_code`` is for the command that sent the request."""

    def __init__(self, code: str, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as identified by the kernel or munge."""

    uid: int
    name: str
    local: bool
    """Connected over the socket of this node."""
