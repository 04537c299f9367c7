"""Devices of a day: which of them are the same GPU, seen by sources that know it by different marks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import polars as pl

from slurm_affinode.history.schema import IDENTITY

Row = dict[str, object]


def adoptions(identities: pl.DataFrame) -> dict[int, int]:
    """Device without a UUID -> the device whose identity it takes.

    ``identities`` has ``device`` and the columns of ``IDENTITY``. A device known by PCI address takes the UUID that
    has this address on the node; one known by index alone takes the UUID, else the PCI address, that has this index;
    always only where exactly one candidate was in use in the time that ``identities`` covers.
    """
    # A device has a row for each way in which it was seen: one source gave its index, another only its address.
    rows = list(identities.select("device", *IDENTITY).unique(maintain_order=True).iter_rows(named=True))
    nameless = [row for row in rows if row["uuid"] is None and (row["pci"] is not None or row["index"] is not None)]
    if not nameless:
        return {}
    with_uuid = [row for row in rows if row["uuid"] is not None]
    by_pci = _unique(with_uuid, _pci)
    by_index = _unique(with_uuid, _index)
    pci_by_index = _unique((row for row in nameless if row["pci"] is not None), _index)
    claimed = {_index(row) for row in with_uuid}
    found: dict[int, int] = {}
    for row in nameless:
        target = by_pci.get(_pci(row)) if row["pci"] is not None else by_index.get(_index(row))
        if target is not None:
            found[row["device"]] = target
    for row in nameless:
        if row["pci"] is None and row["device"] not in found and _index(row) not in claimed:
            target = pci_by_index.get(_index(row))
            if target is not None:
                found[row["device"]] = found.get(target, target)
    return found


def _pci(row: Row) -> Hashable:
    return (row["cluster"], row["node"], row["mig"], row["pci"])


def _index(row: Row) -> Hashable:
    return (row["cluster"], row["node"], row["mig"], row["index"])


def _unique(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> dict[Hashable, int]:
    """Key -> the only device that has it; a key with a missing mark or several devices is absent."""
    devices: dict[Hashable, set[int]] = {}
    for row in rows:
        at = key(row)
        if isinstance(at, tuple) and at[-1] is not None:
            devices.setdefault(at, set()).add(row["device"])  # type: ignore[arg-type]
    return {at: next(iter(ids)) for at, ids in devices.items() if len(ids) == 1}


def merged_identities(identities: pl.DataFrame) -> pl.DataFrame:
    """One row per ``device``, sorted: of each identity column the last value that is not missing."""
    return (
        identities.group_by("device", maintain_order=True)
        .agg(pl.col(name).drop_nulls().last() for name in IDENTITY)
        .sort("device")
    )
