"""Maximum sizes of input: of fields, and of compressed files when decompressed.

A larger field is damaged or forged, is reported, and is not stored. A small compressed file can unpack to terabytes.

Sources: ``_test_strlen`` in slurmctld's ``job_mgr.c`` (1,024 bytes for names and comments, MAXPATHLEN for paths),
Linux's MAX_ARG_STRLEN for one argument of a command. Programs of sites write longer comments than users may.
"""

from __future__ import annotations

NAME_BYTES = 1024
"""For every field without a limit of its own."""
FIELD_BYTES = {
    "job": 4096,  # a label with the IDs of all jobs on a GPU
    "uuid": 256,
    "pci": 64,
    "work_dir": 4096,
    "alloc_tres": 16 << 10,
    "req_tres": 16 << 10,
    "tres_usage": 16 << 10,
    "array_spec": 64 << 10,
    "comment": 64 << 10,
    "constraints": 128 << 10,
    "node_list": 256 << 10,
    "admin_comment": 1 << 20,
    "submit_line": 1 << 20,
}
GPU_LINE_BYTES = 128 << 10
"""For GPU metrics and allocations; also the limit of a cell in Python's ``csv``."""
ACCOUNTING_LINE_BYTES = 4 << 20
DOCUMENT_BYTES = 1 << 30
"""For a compressed document that must be in memory as a whole, decompressed."""
UNPACKED_RATIO = 100
"""For a larger compressed file that is read piece by piece: how many times its size it may unpack to. Text of metrics,
accounting and logs compresses to a twentieth; gzip reaches 1,000 and zstd 10,000 only for repetitions."""
TRACE_TABLE_BYTES = 2 << 30
"""For a table in an archive of a public trace. The largest published one of the traces read here has 14 MB."""
TRACE_ARCHIVE_BYTES = 16 << 30
"""For all tables of such an archive."""


_MOST_UTF8 = 4
"""Bytes of the longest character in UTF-8."""


def most_bytes(field: str) -> int:
    """Return the maximum size of ``field`` in bytes of UTF-8."""
    return FIELD_BYTES.get(field, NAME_BYTES)


def most_unpacked(packed: int) -> int:
    """Return how many bytes a file of ``packed`` bytes may unpack to if it is read piece by piece."""
    return max(DOCUMENT_BYTES, UNPACKED_RATIO * packed)


def excess(field: str, text: str) -> str | None:
    """Return why ``text`` is too long for ``field``; ``None`` if it fits."""
    most = most_bytes(field)
    if _MOST_UTF8 * len(text) <= most:
        return None
    size = len(text) if len(text) > most else len(text.encode("utf-8", "surrogatepass"))
    return too_long(size, most) if size > most else None


def too_long(size: int, most: int) -> str:
    """Return the message for ``size`` bytes where at most ``most`` are allowed."""
    return f"has {size:,} bytes, at most {most:,} fit"
