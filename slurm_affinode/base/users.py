"""Names of users."""

from __future__ import annotations


def name_of_user(uid: int) -> str:
    """Return the name of a user, or the UID if there is none."""
    import pwd  # noqa: PLC0415 - a look-up that may reach over the network; what asks for no name does without

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
