"""Slurm's units: the meaning of each form, and refusal of invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.slurm import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:09", 9), ("01:30", 90), ("00:01.250", 1.25), ("02:03:04", 7384), ("1-00:00:00", 86400),
        ("5-12:30:01", 5 * 86400 + 45001), ("1-12", 129600), ("1-12:30", 131400), ("90", 5400),
        ("UNLIMITED", None), ("Partition_Limit", None), ("INVALID", None), ("Unknown", None), ("", None),
        ("(null)", None),
    ],
)  # fmt: skip
def test_every_form_of_a_duration(text: str, seconds: float | None) -> None:
    """``[DD-[HH:]]MM:SS[.frac]``, the forms of ``--time``, and the words for unknown and unlimited."""
    assert units.parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["abc", "1:2:3:4", "-5", "1d", "12:", "1-", "::"])
def test_invalid_duration_is_refused(text: str) -> None:
    """A damaged cell is an error, never zero."""
    with pytest.raises(ValueError, match="not a span"):
        units.parse_duration_s(text)


@given(st.integers(0, 10**9))
def test_duration_round_trip(seconds: int) -> None:
    """The printed form is ``[DD-]HH:MM:SS``."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    assert units.parse_duration_s(f"{days}-{clock}" if days else clock) == seconds


@pytest.mark.parametrize(
    ("text", "size", "per"),
    [
        ("32G", 32 << 30, ""), ("1999M", 1999 << 20, ""), ("33549588K", 33549588 << 10, ""), ("1.5G", 3 << 29, ""),
        ("2T", 2 << 40, ""), ("1P", 1 << 50, ""), ("4Gn", 4 << 30, "n"), ("500Mc", 500 << 20, "c"), ("0", 0, ""),
        ("512", 512, ""), ("0n", 0, "n"), ("16GB", 16 << 30, ""),
    ],
)  # fmt: skip
def test_every_form_of_memory(text: str, size: int, per: str) -> None:
    """Suffixes K to P are powers of 1024; ``n`` and ``c`` mean per node and per CPU."""
    assert units.parse_memory(text) == units.MemorySize(size, per)


def test_bare_number_is_in_the_unit_of_its_column() -> None:
    """ReqMem is in MiB, MaxRSS in bytes."""
    assert units.parse_memory("4096", bare="M") == units.MemorySize(4096 << 20)


def test_unknown_memory_of_slurm_is_unknown() -> None:
    """It is empty, a question mark, or the number that stands for "not set"."""
    assert units.parse_memory("") is None
    assert units.parse_memory("0?") is None
    assert units.parse_memory("18446744073709551614") is None
    assert units.parse_memory(f"{'9' * 400}.5G") is None
    assert units.parse_joules(f"{'9' * 400}.5G") is None
    with pytest.raises(ValueError, match="not a size"):
        units.parse_memory("12 apples")


def test_memory_per_node_and_per_cpu_is_multiplied() -> None:
    """The job's memory needs the number of nodes or CPUs; without it, it is unknown."""
    assert units.MemorySize(2, "n").total_bytes(nodes=3, cpus=None) == 6
    assert units.MemorySize(2, "c").total_bytes(nodes=3, cpus=8) == 16
    assert units.MemorySize(2, "").total_bytes(nodes=None, cpus=None) == 2
    assert units.MemorySize(2, "c").total_bytes(nodes=3, cpus=None) is None


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("billing=19,cpu=1,gres/gpu:a100=1,gres/gpu=1,mem=32G,node=1", 1, "a100"),
        ("gres/gpu:a100=1,gres/gpu:l4=2", 3, "a100+l4"), ("gres/gpu=4", 4, None), ("cpu=1,mem=2G", None, None),
        ("gres/gpu=0", 0, None), ("", None, None), ("gres/gpu:a100_1g.5gb=2", 2, "a100_1g.5gb"),
        ("gres/gpumem=80G,gres/gpuutil=50,cpu=1", None, None),
    ],
)  # fmt: skip
def test_gpus_are_read_from_tres(text: str, count: int | None, kind: str | None) -> None:
    """Typed entries are summed only if there is no untyped one; no entry is not zero."""
    assert units.gpus_of_tres(units.parse_tres(text)) == units.GpuCounts(count, kind)


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("gpu:2", 2, None), ("gpu:a100:2(S:0-1)", 2, "a100"), ("gres:gpu:2", 2, None), ("gpu", 1, None),
        ("gres/gpu:a100:1", 1, "a100"), ("gpu:a100:1,gpu:l4:2", 3, "a100+l4"), ("craynetwork:1", None, None),
        ("", None, None), ("gpu:tesla", 1, "tesla"), ("gpu:a100:2(IDX:0,3),mps:100", 2, "a100"),
        ("gpu:2,gpu:a100:2(S:0-1)", 2, "a100"), ("gres/gpu:a100:1,gres/gpu:l4:2,gres/gpu:3", 3, "a100+l4"),
    ],
)  # fmt: skip
def test_gpus_are_read_from_old_gres(text: str, count: int | None, kind: str | None) -> None:
    """AllocGRES and ReqGRES of releases before TRES; an untyped entry is the count even if there are typed ones."""
    assert units.parse_gres(text) == units.GpuCounts(count, kind)


@pytest.mark.parametrize("text", ["cpu", "cpu=", "=1", "cpu=1,,mem=2G"])
def test_damaged_tres_is_refused(text: str) -> None:
    """A part is not NAME=AMOUNT."""
    with pytest.raises(ValueError, match="not NAME=AMOUNT"):
        units.parse_tres(text)


names = st.from_regex(r"[a-z]{1,8}(/[a-z]{1,6}(:[a-z0-9]{1,6})?)?", fullmatch=True)


@given(st.dictionaries(names, st.integers(0, 10**6).map(str)))
def test_tres_round_trip(amounts: dict[str, str]) -> None:
    assert units.parse_tres(units.format_tres(amounts)) == amounts


def test_exit_codes_are_parsed() -> None:
    """The parts are status and signal; unknown is neither."""
    assert units.parse_exit_code("0:15") == (0, 15)
    assert units.parse_exit_code("7") == (7, None)
    assert units.parse_exit_code("") == (None, None)
    with pytest.raises(ValueError, match="STATUS:SIGNAL"):
        units.parse_exit_code("x:y")


def test_invalid_gpu_count_is_refused() -> None:
    with pytest.raises(ValueError, match="not a"):
        units.gpus_of_tres({"gres/gpu": "many"})
    assert units.gpus_of_tres({"gres/gpu": "1K"}).count == 1024
