"""The texts of findings (``finding_texts.toml``)."""

from __future__ import annotations

from slurm_affinode.core.evidence_texts import EvidenceTexts
from slurm_affinode.model.finding import Evidence

TEXTS = EvidenceTexts.of(__package__, "finding_texts.toml")
evidence = TEXTS.evidence


def advice(code: str, **values: float | str | None) -> str:
    """Return a text of advice. ``code``: KIND.advice, or KIND.advice-VARIANT. Raises ``KeyError``."""
    return TEXTS.text(code, values)


def xid(number: int | None) -> Evidence:
    """Return the evidence of the last error (XID) that the driver reported; 0: none, ``None``: unknown."""
    if number == 0:
        return evidence("orphan-memory.xid-none", 0.0, met=False)
    meanings = TEXTS.tables["xid"]
    meaning = meanings.get(str(number), meanings["other"])
    return evidence("orphan-memory.xid", None if number is None else float(number), met=False, meaning=meaning)
