"""The rules and texts of the diagnoses (``texts.toml``), and the construction of a diagnosis from its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from slurm_affinode.core.evidence_texts import EvidenceTexts
from slurm_affinode.model.finding import Evidence
from slurm_affinode.model.serving import DIAGNOSES, Diagnosis

TEXTS = EvidenceTexts.of(__package__, "texts.toml")
RULES: Mapping[str, str] = {kind: table["rule"] for kind, table in TEXTS.tables.items() if "rule" in table}
"""Kind of diagnosis -> its rule, for users."""
ADVICE: Mapping[str, str] = {kind: table["advice"] for kind, table in TEXTS.tables.items() if "advice" in table}
"""Kind of diagnosis -> what to do, for users."""
SIGNATURE_NOTE = (
    "The squatter signature published for agentic workloads includes near-maximum power while the GPU is idle. Public "
    "data contradict it: idle GPUs draw little. The diagnosis squatter-signature therefore does not depend on power."
)
"""Remark shown with the diagnosis ``squatter-signature``, for users."""


evidence = TEXTS.evidence


def diagnosis(
    code: str, since: datetime, until: datetime, proof: Sequence[Evidence], *, doubts: Sequence[str] = (),
    figures: Mapping[str, float | None] | None = None, certainty: float = 1.0, advice: str | None = None,
    **values: float | str | None,
) -> Diagnosis:  # fmt: skip
    """Return a diagnosis. Its confidence is the share of the weight of its evidence that is met, times ``certainty``.

    ``code``: KIND.SUMMARY. ``doubts``: codes of their texts. ``values``: those of summary and doubts. ``advice``: its
    text; ``None``: that of the kind. Unknown figures are left out.
    """
    kind = code.partition(".")[0]
    whole = sum(item.weight for item in proof)
    share = sum(item.points for item in proof) / whole if whole else 1.0
    return Diagnosis(
        kind, since, until, round(max(0.0, min(1.0, share * certainty)), 3), tuple(proof), RULES[kind],
        TEXTS.text(code, values), ADVICE.get(kind, "") if advice is None else advice,
        tuple((name, value) for name, value in (figures or {}).items() if value is not None),
        "; ".join(TEXTS.text(doubt, values) for doubt in doubts),
    )  # fmt: skip


def table() -> str:
    """Return the rules as a Markdown table, for the documentation."""
    rows = [f"| `{kind}` | {DIAGNOSES[kind]} | {rule} |" for kind, rule in RULES.items()]
    return "\n".join(["| diagnosis | meaning | rule |", "| --- | --- | --- |", *rows])
