"""What a store may take: its quota, each user's, what has to stay free, and what is promised to images under way."""

from __future__ import annotations

from pathlib import Path

from slurm_affinode.checkpoint.interface import NoRoom, Usage
from slurm_affinode.sizes import size as gib


class Budget:
    """Of one store. Its callers see to it that one thread at a time is here."""

    def __init__(
        self, path: Path, *, quota: int | None, user_quota: int | None, user_share: float | None, reserve: int
    ) -> None:
        """``path``: for messages; the others: as of ``DirectoryStore``."""
        self._path = path
        self.user_share = user_share
        self.quota, self.user_quota, self.reserve = quota, user_quota, reserve
        self._promised: dict[tuple[str, int], tuple[int, int]] = {}

    def promise(self, image: tuple[str, int], uid: int, size: int) -> None:
        """So many bytes are about to be written; ``usage`` does not know of them yet."""
        self._promised[image] = uid, size

    def settle(self, image: tuple[str, int]) -> None:
        """They were written, or will not be."""
        self._promised.pop(image, None)

    @property
    def promised(self) -> int:
        """Bytes that images under way may still take."""
        return self._sum()

    def under_way(self, image: tuple[str, int]) -> bool:
        """Whether something is promised to it."""
        return image in self._promised

    def left(self, usage: Usage) -> int:
        """Bytes that an image may still have; below 0: there are so many more than there may be."""
        promised = self._sum()
        left = usage.free - self.reserve - promised
        return left if self.quota is None else min(left, self.quota - usage.used - promised)

    def check(self, usage: Usage, uid: int, size: int, freeable: int = 0) -> None:
        """Raises ``NoRoom`` with the numbers where a user's image of so many bytes does not fit.

        ``freeable``: so many of the bytes that are used would make room for it.
        """
        promised = self._sum()
        free = max(0, usage.free + freeable - self.reserve - promised)
        if size > free:
            raise NoRoom(f"{self._path}: {gib(free)} free, {gib(size)} needed")
        for what, held, quota in (
            ("the store has", usage.used - freeable + promised, self.quota),
            (f"user {uid} has", usage.by_user.get(uid, 0) + self._sum(uid), self._of_user(usage)),
        ):
            if quota is not None and held + size > quota:
                raise NoRoom(f"{self._path}: {what} {gib(held)} of {gib(quota)}, {gib(size)} needed")

    def _of_user(self, usage: Usage) -> int | None:
        """Bytes that one user may have; ``None``: no limit."""
        if self.user_share is None:
            return self.user_quota
        whole = usage.used + usage.free if self.quota is None else self.quota
        return int(self.user_share * whole)

    def _sum(self, uid: int | None = None) -> int:
        return sum(size for user, size in self._promised.values() if uid in (None, user))
