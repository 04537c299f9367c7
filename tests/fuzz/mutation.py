"""Mutation of valid inputs into hostile ones.

A coverage-guided fuzzer (atheris) slows instrumented Python down to a tenth of its speed, and its own threads and
descriptors count as leaks; the formats here are small and known. So inputs are mutations of valid ones with words to
which the formats and their readers are sensitive. That gives a million inputs in minutes on one core, reproducible by
seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

LINE_ENDS = ("\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
"""All line ends of ``str.splitlines``; the kernel escapes only the first one."""

NUMBERS = (
    "0",
    "-1",
    "1",
    "+1",
    "00",
    "1_0",
    " 1",
    "4294967295",
    "4294967296",
    "9223372036854775808",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "1.5",
    "\N{ARABIC-INDIC DIGIT ONE}",
    "\N{SUPERSCRIPT TWO}",
    "\N{FULLWIDTH DIGIT SEVEN}",
    "9" * 400,
    "9" * 5000,
)
"""Near-numbers, and numbers near or beyond limits."""

BYTES = (
    b"\n",
    b"\r",
    b"\r\n",
    b"\0",
    b"=",
    b":",
    b",",
    b" ",
    b"\t",
    b")",
    b") S 1 1",
    b"(",
    b"/",
    b"/../",
    b"//",
    b"%s%n",
    b"\x1b[2J",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x80\xa8",
    b"\xc2\x85",
    b"\x7f",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"null",
    b"true",
)


def some(rng: Random, choices: Sequence[Any]) -> Any:
    """Return one of the choices; faster than ``choice``."""
    return choices[int(rng.random() * len(choices))]


def mutated(rng: Random, data: bytes, words: Sequence[bytes] = (), most: int = 1 << 16) -> bytes:
    """Return ``data`` with one to eight changes; one input in eight is unchanged."""
    made = bytearray(data)
    for _ in range(some(rng, (0, 1, 1, 1, 2, 2, 4, 8))):
        at = int(rng.random() * (len(made) + 1))
        what = int(rng.random() * 10)
        if what == 0 and made:
            made[at - 1] ^= 1 << int(rng.random() * 8)
        elif what == 1 and made:
            made[at - 1] = int(rng.random() * 256)
        elif what == 2:
            made[at:at] = rng.randbytes(1 + int(rng.random() * 16))
        elif what == 3:
            del made[at : at + 1 + int(rng.random() * 8)]
        elif what == 4:
            del made[at:]
        elif what == 5:
            end = at + 1 + int(rng.random() * 32)
            made[at:at] = made[at:end] * some(rng, (1, 1, 2, 40))
        elif what == 6:
            made[at:at] = some(rng, BYTES)
        elif what == 7:
            made[at : at + int(rng.random() * 4)] = some(rng, NUMBERS).encode()
        elif words:
            made[at : at + int(rng.random() * 4)] = some(rng, words)
        if len(made) > most:
            del made[most:]
    return bytes(made)


def text(rng: Random, most: int = 15) -> str:
    """Return a name that a user may choose, without NUL: letters, line ends, control characters, invalid UTF-8.

    Bytes are surrogates, as in ``os.fsdecode``.
    """
    made = []
    for _ in range(int(rng.random() * most)):
        what = int(rng.random() * 6)
        if what == 0:
            made.append(some(rng, LINE_ENDS))
        elif what == 1:
            made.append(
                some(rng, (") S 1 ", "(", "Uid:\t0", "NSpid:\t1", "VmSwap:", "PPid:\t1", "flags:\t02", " (deleted)"))
            )
        elif what == 2:
            made.append(chr(1 + int(rng.random() * 31)))
        elif what == 3:
            made.append(chr(0xDC80 + int(rng.random() * 128)))
        else:
            made.append(some(rng, "ab /:-.=é\N{GRINNING FACE}0\\"))
    return "".join(made)


def name(rng: Random, most_bytes: int = 15) -> bytes:
    """Return such a name as bytes, at most ``most_bytes`` of them."""
    return text(rng).encode("utf-8", "surrogateescape")[:most_bytes]


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**32,
    2**63,
    2**64,
    10**400,
    0.0,
    -0.0,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "\0",
    "\n",
    "x",
    "\ud800",
    "0",
    "-1",
    "nan",
    "../..",
    "/etc/shadow",
    "a" * 2000,
    [],
    [[]],
    [None],
    {},
    {"": None},
    ["x"] * 50,
    {"a": {"b": {"c": []}}},
)
"""Values of every JSON type."""


def mutated_json(rng: Random, value: Any, words: Sequence[bytes] = ()) -> bytes:
    """Return a mutation of ``value`` as text: keys and values changed, added, removed, nested; or bytes changed."""
    if rng.random() < 0.02:
        depth, (opening, closing) = some(rng, (10, 1000, 20000)), some(rng, (("[", "]"), ('{"a":', "}")))
        return (opening * depth + "1" + closing * int(rng.random() * (depth + 1))).encode()
    for _ in range(some(rng, (0, 1, 1, 1, 2, 3))):
        value = _changed(rng, value)
    data = json.dumps(value).encode()
    return mutated(rng, data, words) if rng.random() < 0.2 else data


def _changed(rng: Random, value: Any) -> Any:
    """Return a copy with one change."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = some(rng, list(value))
        what = rng.random()
        if what < 0.1:
            return {item: inner for item, inner in value.items() if item != key}
        if what < 0.2:
            return {**value, some(rng, (*value, "x", "", "\ud800", "__class__")): some(rng, HOSTILE)}
        return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = int(rng.random() * len(value))
        what = rng.random()
        if what < 0.1:
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return [*value, value[at]]
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and rng.random() < 0.5:
        at = int(rng.random() * (len(value) + 1))
        return value[:at] + some(rng, (text(rng), some(rng, NUMBERS))) + value[at + int(rng.random() * 3) :]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + some(rng, (-1, 1, 2**32, -(2**33), 10**20))
    return some(rng, HOSTILE)
