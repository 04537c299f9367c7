"""Job states: the long words, their two-letter forms, and what sacct makes of them in a narrow column."""

from __future__ import annotations

import re

STATES = {
    "BOOT_FAIL": "BF",
    "CANCELLED": "CA",
    "COMPLETED": "CD",
    "COMPLETING": "CG",
    "CONFIGURING": "CF",
    "DEADLINE": "DL",
    "FAILED": "F",
    "NODE_FAIL": "NF",
    "OUT_OF_MEMORY": "OOM",
    "PENDING": "PD",
    "PREEMPTED": "PR",
    "REQUEUED": "RQ",
    "REQUEUE_FED": "RF",
    "REQUEUE_HOLD": "RH",
    "RESIZING": "RS",
    "RESV_DEL_HOLD": "RD",
    "REVOKED": "RV",
    "RUNNING": "R",
    "SIGNALING": "SI",
    "SPECIAL_EXIT": "SE",
    "STAGE_OUT": "SO",
    "STOPPED": "ST",
    "SUSPENDED": "S",
    "TIMEOUT": "TO",
}
_SHORT = {short: word for word, short in STATES.items()}
_BY = re.compile(r"^(CANCELLED|CA) by (.+)$", re.IGNORECASE)
_WORD = re.compile(r"^[A-Z][A-Z_]+$")


def parse(text: str) -> tuple[str | None, str | None]:
    """The canonical word and who cancelled: ``CANCELLED by 1000`` is ``("CANCELLED", "1000")``.

    A word cut by a narrow column (``OUT_OF_ME+``, ``COMPLETI``) is completed where only one state begins so;
    ``COMPLET`` alone is COMPLETED. A word of a later Slurm release is kept. Raises ``ValueError``.
    """
    clean = text.strip()
    if not clean or clean.lower() in ("unknown", "none"):
        return None, None
    if match := _BY.match(clean):
        return "CANCELLED", match[2].strip()
    cut = clean.endswith("+")
    word = clean.rstrip("+").upper()
    if word in STATES:
        return word, None
    if word in _SHORT and not cut:
        return _SHORT[word], None
    starts = [state for state in STATES if state.startswith(word)] if len(word) >= 3 else []
    if "COMPLETED" in starts:
        return "COMPLETED", None
    if len(starts) == 1:
        return starts[0], None
    if word.startswith("CANCELLED B"):  # "CANCELLED b+"
        return "CANCELLED", None
    if _WORD.match(word) and not starts and not cut:
        return word, None
    raise ValueError(f"{text!r} is not a job state")
