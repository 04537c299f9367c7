"""Slurm's units: time spans, memory sizes, TRES and GRES strings, exit codes.

``None`` is unknown. Sources: the manual pages ``sacct(1)`` (Elapsed, ReqMem, AllocTRES), ``sbatch(1)`` (``--time``)
and ``slurm.conf(5)`` (AccountingStorageTRES).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

UNKNOWN_WORDS = frozenset(
    {"", "unknown", "none", "n/a", "invalid", "partition_limit", "not_set", "noval", "?", "(null)"}
)
"""Slurm's words for an unknown value, in lower case."""

UNLIMITED_WORDS = frozenset({"unlimited", "infinite"})

DURATION_PATTERN = r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.(\d+))?$"
MEMORY_PATTERN = r"^(\d+(?:\.\d+)?)([KMGTPE]?)(?:i?B)?([nc?]?)$"

_DURATION = re.compile(DURATION_PATTERN)
_FRACTION = re.compile(r"\d+\.\d*[1-9]\d*")
_MEMORY = re.compile(MEMORY_PATTERN, re.IGNORECASE)
NO_VALUE = 1 << 62
"""Slurm stores "not set" as a number near 2**64 (NO_VAL64, INFINITE64); no real quantity is that large."""

MAX_SECONDS = 10**11
"""Three thousand years; longer spans are damaged."""

MAX_GPUS = 10**7
"""More than any cluster has; larger numbers are damaged."""

_SCALED = re.compile(r"(\d+\.\d+)([KMGTPE]?)", re.IGNORECASE)
SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50, "E": 1 << 60}


def is_unknown(text: str) -> bool:
    """Return whether ``text`` is one of Slurm's words for an unknown value."""
    return text.strip().lower() in UNKNOWN_WORDS


def is_unlimited(text: str) -> bool:
    """Return whether ``text`` means no limit."""
    return text.strip().lower() in UNLIMITED_WORDS


def parse_duration_s(text: str) -> float | None:
    """Return the seconds of ``[DD-[HH:]]MM:SS[.frac]``, ``DD-HH``, ``DD-HH:MM`` or a bare number of minutes.

    With days, the first number after the dash is hours (as in ``sbatch --time``); without, two numbers are minutes
    and seconds. ``None`` if unknown or unlimited. Raises ``ValueError``.
    """
    clean = text.strip()
    if is_unknown(clean) or is_unlimited(clean):
        return None
    match = _DURATION.match(clean)
    if match is None:
        raise ValueError(f"{text!r} is not a span of time")
    days, first, second, third, fraction = match.groups()
    leading, middle, trailing = int(first), int(second or 0), int(third or 0)
    if days is not None:
        seconds = int(days) * 86400 + leading * 3600 + middle * 60 + trailing
    elif third is not None:
        seconds = leading * 3600 + middle * 60 + trailing
    elif second is not None:
        seconds = leading * 60 + middle
    else:
        seconds = leading * 60
    if seconds > MAX_SECONDS:
        raise ValueError(f"{text!r} is longer than any job")
    return float(f"{seconds}.{fraction}") if fraction else float(seconds)


@dataclass(frozen=True, slots=True)
class MemorySize:
    """A memory size as Slurm prints it: ``per`` is ``"n"`` (per node), ``"c"`` (per CPU) or ``""`` (whole job)."""

    size_bytes: int
    per: str = ""

    def total_bytes(self, *, nodes: int | None, cpus: int | None) -> int | None:
        """Return the bytes of the whole job; ``None`` if the number of nodes or CPUs is needed but unknown."""
        factor = {"n": nodes, "c": cpus}.get(self.per, 1)
        return None if factor is None else self.size_bytes * factor


def parse_memory(text: str, *, bare: str = "") -> MemorySize | None:
    """Parse a size with a suffix K M G T P E (powers of 1024) and an ending ``n`` or ``c`` of older releases.

    A number without a suffix is in ``bare`` (``""``: bytes, as MaxRSS and TRES usage; ``"M"``: as ReqMem and ``mem`` in
    TRES strings). ``None`` if unknown. Raises ``ValueError``.
    """
    clean = text.strip()
    if is_unknown(clean):
        return None
    match = _MEMORY.match(clean)
    if match is None:
        raise ValueError(f"{text!r} is not a size of memory")
    number, suffix, per = match.groups()
    scale = SCALE[(suffix or bare).upper()]
    size = _scaled(number, scale)
    if size is None or per == "?":
        return None
    return MemorySize(size, per.lower())


def parse_count(text: str) -> int | None:
    """Parse a count; large ones have a suffix for powers of 1024 (NNodes ``1.5K``). ``None`` if unknown.

    Raises ``ValueError``, also for a fraction without a suffix.
    """
    if _FRACTION.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not a whole number")
    try:
        memory = parse_memory(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a count") from None
    return None if memory is None else memory.size_bytes


def parse_joules(text: str) -> int | None:
    """Parse ConsumedEnergy in joules: ``1.53M``, in powers of 1000, unlike sizes (sacct's print.c). ``None``: unknown.

    Raises ``ValueError``.
    """
    clean = text.strip()
    if is_unknown(clean) or clean.lower() == "nan":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTPE]?)", clean, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not an energy in joules")
    number, suffix = match.groups()
    scale = 1000 ** " KMGTPE".index(suffix.upper() or " ")
    return _scaled(number, scale)


def _scaled(number: str, scale: int) -> int | None:
    """Return the integer or decimal ``number`` times ``scale``; ``None`` if the product means "not set"."""
    amount = int(number) * scale if number.isdigit() else float(number) * scale
    return None if amount >= NO_VALUE else round(amount)


def parse_tres(text: str) -> dict[str, str]:
    """Parse ``billing=19,cpu=1,gres/gpu:a100=1,mem=32G`` to a mapping of name to amount. Raises ``ValueError``."""
    clean = text.strip()
    if is_unknown(clean):
        return {}
    amounts: dict[str, str] = {}
    for part in clean.split(","):
        name, equals, amount = part.strip().partition("=")
        if not equals or not name or not amount:
            raise ValueError(f"{part!r} is not NAME=AMOUNT")
        amounts[name] = amount
    return amounts


def format_tres(amounts: Mapping[str, object]) -> str:
    """Return a TRES string sorted by name: the inverse of ``parse_tres``."""
    return ",".join(f"{name}={amounts[name]}" for name in sorted(amounts))


@dataclass(frozen=True, slots=True)
class GpuCounts:
    """The GPUs that a TRES or GRES string names. ``count`` is ``None`` if it names none."""

    count: int | None
    kind: str | None = None
    """The types, sorted and joined by ``+``; ``None`` if no type is named."""


def gpus_of_tres(amounts: Mapping[str, str]) -> GpuCounts:
    """Return the GPUs of a parsed TRES string: typed entries are summed only if there is no untyped one.

    Raises ``ValueError`` for an amount that is not a number.
    """
    typed = {name[9:]: amount for name, amount in amounts.items() if name.startswith("gres/gpu:")}
    kind = "+".join(sorted(typed)) or None
    if "gres/gpu" in amounts:
        return GpuCounts(_whole(amounts["gres/gpu"]), kind)
    if typed:
        return GpuCounts(_believable(sum(_whole(amount) for amount in typed.values())), kind)
    return GpuCounts(None)


def parse_gres(text: str) -> GpuCounts:
    """Parse the GPUs of AllocGRES and ReqGRES: ``gpu:2``, ``gpu:a100:2(S:0-1)``, ``gres:gpu:2``, ``gpu``.

    These columns of older releases are sums over all nodes of the job. Typed entries are summed only if there is no
    untyped one, as in TRES. Raises ``ValueError``.
    """
    clean = text.strip()
    if is_unknown(clean):
        return GpuCounts(None)
    untyped: int | None = None
    typed: int | None = None
    kinds: set[str] = set()
    for part in _split_outside_parentheses(clean):
        words = re.sub(r"\(.*?\)", "", part).strip().replace("=", ":").split(":")
        if words[0] == "gres":
            words = words[1:]
        if words and words[0].startswith("gres/"):
            words[0] = words[0][5:]
        if not words or words[0] != "gpu":
            continue
        if len(words) > 1 and re.fullmatch(r"-\d+|[-+]?\d+\.\d+", words[-1]):
            raise ValueError(f"{words[-1]!r} is not a whole number of GPUs")
        amount = words[-1] if len(words) > 1 and words[-1].isdecimal() else None
        count = int(amount) if amount is not None else 1
        named = [word for word in words[1 : -1 if amount is not None else None] if word]
        if named:
            typed = (typed or 0) + count
            kinds.update(named)
        else:
            untyped = (untyped or 0) + count
    total = typed if untyped is None else untyped
    return GpuCounts(None if total is None else _believable(total), "+".join(sorted(kinds)) or None)


def parse_exit_code(text: str) -> tuple[int | None, int | None]:
    """Return status and signal of ``1:0`` or a bare status. Unknown is ``(None, None)``. Raises ``ValueError``."""
    clean = text.strip()
    if is_unknown(clean):
        return None, None
    match = re.fullmatch(r"(-?\d{1,10})(?::(\d{1,10}))?", clean)
    if match is None:
        raise ValueError(f"{text!r} is not STATUS:SIGNAL")
    return int(match[1]), None if match[2] is None else int(match[2])


def _split_outside_parentheses(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def _whole(amount: str) -> int:
    """Parse a number of GPUs. Slurm prints it in full (``uint64``), so a suffix must also give a whole number."""
    value = int(amount) if amount.isdecimal() else parse_count(amount)
    if value is None:
        raise ValueError(f"{amount!r} is not a count")
    if (scaled := _SCALED.fullmatch(amount)) and (Fraction(scaled[1]) * SCALE[scaled[2].upper()]).denominator > 1:
        raise ValueError(f"{amount!r} is not a whole number of GPUs")
    return _believable(value)


def _believable(gpus: int) -> int:
    """Return ``gpus``; raise ``ValueError`` if it exceeds ``MAX_GPUS``."""
    if gpus > MAX_GPUS:
        raise ValueError(f"{gpus} GPUs are more than any job has")
    return gpus
