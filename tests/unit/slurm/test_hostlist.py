"""Expansion of hostlists, number ranges, and rejection of invalid lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.slurm import hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu-2", ["gpu-2"]),
        ("gpu[01-03,07],login", ["gpu01", "gpu02", "gpu03", "gpu07", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("n[9-11]x", ["n9x", "n10x", "n11x"]),
        ("a[1],b[2-2],a1", ["a1", "b2"]),
        ("n[001-003]-ib", ["n001-ib", "n002-ib", "n003-ib"]),
        ("None assigned", []), ("", []), ("(null)", []),
    ],
)  # fmt: skip
def test_hostlist_is_expanded(text: str, names: list[str]) -> None:
    """Several brackets and ranges, leading zeros, repeated names once; no node is an empty list."""
    assert hostlist.expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["a[1-", "a]1[", "a[[1]]", "a[1-2", "a[x]", "a[3-1]", "a,,b", "a b", "a[]", "a\nb", ",a", "a[1-2-3]"],
)
def test_damaged_lists_are_refused(text: str) -> None:
    """Brackets are unbalanced or ranges invalid."""
    with pytest.raises(ValueError, match=r"."):
        hostlist.expand(text)


@pytest.mark.parametrize("text", ["n[0-999999999]", "n[1-9999]m[1-9999]", "n[1-99999999999999999999999]"])
def test_excessive_lists_are_refused_without_expansion(text: str) -> None:
    with pytest.raises(ValueError, match="more than"):
        hostlist.expand(text)
    with pytest.raises(ValueError, match="more than"):
        hostlist.count(text)


@pytest.mark.parametrize("text", ["a" + "[1]" * 5000, "a" * 5000 + "[1-262144]", "a[1-2]" + "b" * 300])
def test_names_that_are_too_long_are_refused(text: str) -> None:
    """They exhaust neither the stack nor the memory."""
    with pytest.raises(ValueError, match="more than 255 characters"):
        hostlist.expand(text)


def test_counting_does_not_expand() -> None:
    assert hostlist.count("r[1-20]n[01-10],x") == 201
    assert hostlist.count("None assigned") == 0


def test_numbers_are_compressed_to_ranges() -> None:
    """Numbers keep their width."""
    assert hostlist.compress_numbers(["1", "2", "3", "7"]) == "1-3,7"
    assert hostlist.compress_numbers(["01", "02", "03", "7"]) == "7,01-03"
    assert hostlist.compress_numbers(["9", "10", "11"]) == "9-11"


number = st.builds(lambda number, width: str(number).zfill(width), st.integers(0, 1200), st.integers(1, 4))


@given(st.sets(number, min_size=1, max_size=40))
def test_ranges_survive_a_round_trip(numbers: set[str]) -> None:
    assert set(hostlist.expand(f"n[{hostlist.compress_numbers(numbers)}]")) == {f"n{item}" for item in numbers}


@given(st.text(alphabet="ab01,-[]", max_size=20))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    """The only exception raised is ``ValueError``, and ``count`` agrees."""
    try:
        names = hostlist.expand(text)
    except ValueError:
        return
    assert hostlist.count(text) >= len(names)
