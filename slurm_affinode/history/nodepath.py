"""The node that the path of a file names, for formats that do not say which node they are of."""

from __future__ import annotations

import re

_TOOL_WORD = re.compile(
    "samples?|logs?|gpus?|metrics?|history|exports?|data|out|output|smi|nvidia|dmon|dcgmi?|util|utilization|stats?|monitor|"
    "monitoring|usage|csv|tmp|temp|dump|query|prom|prometheus|node|host|scrapes?|exporter|federate",
    re.IGNORECASE,
)
_NO_HOST = re.compile(
    "week|w|day|d|hour|h|month|m|year|y|q|t|v|rev|version|run|step|job|part|chunk|shard|batch|test|file|copy|backup|bak|old|"
    "new|stdin|tmp|archive|top|disk|vol|volume",
    re.IGNORECASE,
)
_HOST_WORDS = ("gpu", "node", "host")
_DATE = re.compile(
    r"(?<![0-9])\d{4}[-_.]?\d{2}(?:[-_.]?\d{2})?(?:[-_.T]?\d{2}[-_.:]?\d{2}(?:[-_.:]?\d{2})?Z?)?(?![0-9])"
)
_HOST = re.compile(r"([A-Za-z]+(?:-[A-Za-z]+)*)-?\d+(?:-?[A-Za-z]*\d+)*")


def node_from_path(path: str) -> str | None:
    """The node that the name of a file, else of its directory, names.

    ``gpu01.csv``, ``nvidia-smi_gpu01_2026-11-01.log``, ``gpu-01/dmon.txt``. Dates and words that name the tool are
    taken off; what is left has to be one name that ends in a number and does not count weeks, runs or parts.
    """
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    if not parts:
        return None
    name = _DATE.sub("", parts[-1].split(".", 1)[0])
    found = [host for part in name.split("_") if (host := _host(part)) is not None]
    # A device behind the node ("gpu01_gpu0") is no second host.
    hosts = [host for host in found if not re.fullmatch(r"gpu\d", host.lower())] or found
    if len(hosts) == 1:
        return hosts[0]
    # Directories have names of many kinds: one counts only where it is a host name and nothing else.
    above = parts[-2].split(".", 1)[0] if len(parts) > 1 else ""
    return above if above and _host(above) == above else None


def _host(part: str) -> str | None:
    words = [word for word in part.split("-") if word]
    while words and _is_tool(words):
        words = words[1:]
    while len(words) > 1 and _TOOL_WORD.fullmatch(words[-1]):
        words = words[:-1]
    kept = "-".join(words)
    match = _HOST.fullmatch(kept)
    return kept if match is not None and len(kept) <= 40 and not _is_numbered_file(match.group(1)) else None


def _is_numbered_file(word: str) -> bool:
    """Whether a number behind ``word`` counts files rather than hosts: ``smi2``, ``part0001``."""
    if word.lower() in _HOST_WORDS:
        return False
    return _NO_HOST.fullmatch(word) is not None or _TOOL_WORD.fullmatch(word) is not None


def _is_tool(words: list[str]) -> bool:
    """Whether the first word is none of a host name; ``gpu`` and ``node`` are in ``gpu-01``."""
    first = words[0].lower()
    return _TOOL_WORD.fullmatch(first) is not None and not (
        first in _HOST_WORDS and len(words) > 1 and words[1].isdigit()
    )
