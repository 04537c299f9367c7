"""Check the subject of a commit message: a ``commit-msg`` hook, called with the file that holds the message.

The subject begins with an imperative verb in upper case and has at most 72 characters and no full stop. The second line
is empty.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST = 72
_GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
_NOT_IMPERATIVE = re.compile(r"\w+(ed|ing|s)\b")
_IMPERATIVE = {
    "Address", "Assess", "Bring", "Bypass", "Compress", "Discuss", "Dress", "Embed", "Express", "Feed", "Focus",
    "Guess", "Miss", "Need", "Pass", "Ping", "Press", "Process", "Proceed", "Ring", "Seed", "Shed", "Speed", "Spring",
    "String", "Suppress", "Swing", "Toss", "Weed", "Witness",
}  # fmt: skip
"""Imperatives that end like another form."""


def faults(message: str) -> list[str]:
    """Return what is wrong with a commit message, one line each; lines that begin with ``#`` do not count."""
    lines = [line for line in message.split("\n") if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(_GENERATED):
        return []
    word = subject.partition(" ")[0]
    result = []
    if not subject.strip():
        result.append("the subject is empty")
    elif not word[:1].isupper():
        result.append(f"the subject begins with {word!r}: begin with an imperative verb in upper case")
    elif word not in _IMPERATIVE and _NOT_IMPERATIVE.fullmatch(word):
        result.append(f"the subject begins with {word!r}: use the imperative (Fix, not Fixed, Fixes or Fixing)")
    if len(subject) > MOST:
        result.append(f"the subject has {len(subject)} characters: {MOST} are allowed")
    if subject.endswith("."):
        result.append("the subject ends with a full stop")
    if len(lines) > 1 and lines[1].strip():
        result.append("the second line is not empty")
    return result


def main(arguments: list[str]) -> int:
    """Print the faults of the message in the named file; return 1 if there is one."""
    result = faults(Path(arguments[0]).read_text(encoding="utf-8"))
    for fault in result:
        print(f"commit message: {fault}", file=sys.stderr)
    return bool(result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
