"""Identity of devices: canonical identity columns, and a 64-bit number derived from them.

Nodes are named by short host name, as in Slurm. A GPU is identified by its UUID, else by its PCI address, else by its
index on the node; a MIG instance is a separate device, distinguished by ``mig``.
"""

from __future__ import annotations

import re
from hashlib import blake2b

import polars as pl

from slurm_affinode.metrics.schema import IDENTITY

KEY = ("cluster", "node", "uuid", "pci", "index", "mig")
"""The identity columns that distinguish devices; ``model`` and ``mig_profile`` only describe them."""

_PCI = re.compile(r"(?:([0-9A-Fa-f]{4,8}):)?([0-9A-Fa-f]{1,2}):([0-9A-Fa-f]{1,2})(?:\.([0-7]))?")
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:]+\]?")


def device_id(  # noqa: PLR0917 - the columns of KEY, in order
    cluster: str | None, node: str | None, uuid: str | None, pci: str | None, index: int | None, mig: str | None
) -> int:
    """Return the number of a device: the 8-byte BLAKE2b digest of its canonical identity."""
    if uuid is not None:
        what = uuid
    elif pci is not None:
        what = f"pci:{pci}"
    else:
        what = f"index:{'' if index is None else index}"
    text = "\x1f".join((cluster or "", node or "", what, mig or ""))
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def with_device(identities: pl.DataFrame) -> pl.DataFrame:
    """Insert the column ``device`` (UInt64) before ``identities`` (columns of ``IDENTITY``; missing ones are null)."""
    full = identities.select(
        (pl.col(name) if name in identities.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in IDENTITY.items()
    )
    numbers = [device_id(*row) for row in full.select(KEY).iter_rows()]
    return full.insert_column(0, pl.Series("device", numbers, dtype=pl.UInt64))


def pci_address(text: str) -> str | None:
    """Return ``0000:e1:00.0`` as ``00000000:E1:00.0``; None if ``text`` is no PCI address."""
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, slot, function = match.groups()
    return f"{(domain or '0').upper():0>8}:{bus.upper():0>2}:{slot.upper():0>2}.{function or '0'}"


def node_name(text: str) -> str | None:
    """Return the short name of ``gpu01``, ``gpu01.example.org`` or ``gpu01.example.org:9400``. Addresses are kept."""
    clean = text.strip()
    if not clean:
        return None
    if "://" in clean:
        clean = clean.split("://", 1)[1].split("/", 1)[0]
    if clean.startswith("["):
        return clean.split("]", 1)[0].lstrip("[") or None
    host = clean.rsplit(":", 1)[0] if clean.count(":") == 1 else clean
    if _ADDRESS.fullmatch(host):
        return host
    return host.split(".", 1)[0] or None
