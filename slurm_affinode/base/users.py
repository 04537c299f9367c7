"""Names of users."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from contextlib import suppress


def uids(names: Iterable[str]) -> frozenset[int]:
    """Return the UIDs of users; names that do not exist are ignored."""
    numbers = set()
    for name in names:
        with suppress(KeyError):
            numbers.add(pwd.getpwnam(name).pw_uid)
    return frozenset(numbers)


def uid_of_user(name: str) -> int | None:
    """Return the UID of a user, or ``None`` if this machine knows no such user."""
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # ValueError: a name with a NUL character
        return None


def name_of_user(uid: int) -> str:
    """Return the name of a user, or the UID if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
