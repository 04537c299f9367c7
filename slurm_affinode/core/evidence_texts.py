"""Evidence from numbers and codes: the texts are templates in a TOML file, as ``base/text_templates.py`` describes.

A table ``[TABLE.DIMENSION]`` has the ``unit`` and the ``text`` of a piece of evidence, and may have its ``threshold``
and the text of an ``unknown`` value. ``[TABLE.DIMENSION-VARIANT]`` replaces some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_affinode.base.text_templates import TextTable, filled
from slurm_affinode.model.finding import Evidence


@dataclass(frozen=True, slots=True)
class EvidenceTexts(TextTable):
    """The texts of evidence of one file, by table and dimension."""

    _entries: dict[str, tuple[str, Mapping[str, Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Code -> dimension and texts: thousands of findings have the same codes."""

    def evidence(
        self,
        code: str,
        value: float | str | None,
        weight: float = 0.0,
        *,
        met: bool = True,
        sources: int = 1,
        **values: float | str | None,
    ) -> Evidence:
        """Return a piece of evidence; it is unknown, and not met, if it has no value.

        ``code``: TABLE.DIMENSION or TABLE.DIMENSION-VARIANT. ``values``: those of its texts, besides ``value``. Raises
        ``KeyError`` for an unknown code or a value that is not given.
        """
        dimension, entry = self._entries.get(code) or self._combined(code)
        unknown = value is None
        values["value"] = value
        threshold = filled(entry["threshold"], values) if "threshold" in entry else None
        text = filled(entry["unknown" if unknown and "unknown" in entry else "text"], values)
        return Evidence(
            dimension, value, entry["unit"], threshold, weight, text or "", unknown=unknown, met=met and not unknown,
            sources=sources,
        )  # fmt: skip

    def _combined(self, code: str) -> tuple[str, Mapping[str, Any]]:
        """Return the dimension of a code, and its texts with those of the dimension that it does not replace."""
        table, _, key = code.partition(".")
        dimension = key.partition("-")[0]
        entry = {**self.tables[table].get(dimension, {}), **self.entry(code)}
        return self._entries.setdefault(code, (dimension, entry))
