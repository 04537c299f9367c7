"""URLs of object stores, as typed by users: ``s3://BUCKET/PREFIX``."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from urllib.parse import unquote, urlsplit

from slurm_affinode.base.errors import AffinodeError

SCHEMES = ("s3", "gs", "abfs", "abfss")
_EXAMPLE = "write for example /var/lib/samples or s3://bucket/slurm-affinode"


@dataclass(frozen=True, slots=True)
class ObjectPrefix:
    """Objects of an object store whose names begin with the same prefix, and where copies of them are kept."""

    url: str
    """Without ``/`` at the end."""
    cache: Path
    """Directory of the copies, on each machine that reads."""
    cache_bytes: int
    """Copies of objects that no command uses are deleted beyond this size."""

    def __truediv__(self, name: str) -> ObjectPrefix:
        """Return the objects below ``name``."""
        return ObjectPrefix(f"{self.url}/{name}", self.cache / name, self.cache_bytes)

    def __str__(self) -> str:
        """Return the URL."""
        return self.url

    def absolute(self) -> ObjectPrefix:
        """Return it with an absolute path of the copies."""
        return ObjectPrefix(self.url, self.cache.absolute(), self.cache_bytes)


StorePlace = Path | ObjectPrefix
"""Where a sample store is."""


def store_place(text: str, cache: Path, cache_bytes: int) -> StorePlace:
    """Return the place that a path or URL names; copies are in a directory below ``cache``.

    ``file://`` is a path. Raises ``AffinodeError`` for other URLs than those of ``SCHEMES``, and for credentials.
    """
    if "://" not in text:
        if not text.startswith("/"):
            raise AffinodeError(f"{text!r} is neither an absolute path nor a URL", hint=_EXAMPLE)
        return Path(text)
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise AffinodeError(f"{text.partition('://')[0]}:// is not a URL: {error}", hint=_EXAMPLE) from None
    scheme = parts.scheme.lower()
    if parts.password is not None or (parts.username is not None and scheme in ("s3", "gs", "file")) or parts.query:
        raise AffinodeError(
            f"credentials in the URL of {parts.hostname}: every user of this machine could read them",
            hint="the standard configuration of the object store has them: for s3, AWS_ACCESS_KEY_ID or ~/.aws",
        )
    if scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return Path(unquote(parts.path))
    if scheme not in SCHEMES or not parts.hostname or parts.fragment or not text.isprintable() or " " in text:
        schemes = ", ".join(f"{name}://" for name in ("file", *SCHEMES))
        raise AffinodeError(f"{text!r} is not the URL of an object store ({schemes})", hint=_EXAMPLE)
    url = f"{scheme}://{parts.netloc}/{parts.path.strip('/')}".rstrip("/")
    return ObjectPrefix(url, cache / blake2b(url.encode(), digest_size=8).hexdigest(), cache_bytes)
