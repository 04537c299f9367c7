"""Files of administrators: every error is reported at once, with its line and a hint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base import config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.toml_schema import (
    MAY_BE_EMPTY,
    Amount,
    KnownNames,
    Percent,
    Span,
    TomlError,
    TomlFile,
    TomlList,
    either,
    parsed,
    seconds,
    text,
    within,
)


@dataclass(frozen=True)
class Inner:
    """A table with a key that is needed."""

    size: Annotated[int, within(1, 9)]
    share: Amount = 1.0


@dataclass(frozen=True)
class Outer:
    """A section with every kind of value."""

    name: str | None = None
    empty: Annotated[str, MAY_BE_EMPTY] = ""
    on: bool = False
    path: Path | None = None
    wait: Span = "1m"
    words: tuple[Annotated[str, either("red", "green")], ...] = ()
    limits: Annotated[Mapping[str, Percent], KnownNames(("cpu", "gpu"))] = field(default_factory=dict)
    nodes: Mapping[str, Inner] = field(default_factory=dict)
    source: str | None = None


def faults(toml: str) -> list[str]:
    file = TomlFile(toml)
    file.section(Outer, file.data)
    return [fault.line_of("f") for fault in file.faults]


def test_all_errors_of_a_file_are_reported_at_once() -> None:
    """One line each, in the order of the file, with the value, the allowed ones and a hint."""
    toml = (
        "names = 1\non = 'yes'\nwait = 'soon'\nwords = ['red', 'gren']\nsource = 'x'\n"
        "[limits]\ncpu = 200\nmemory = 1\n"
        "[nodes.a]\nshare = -1\n[nodes.b]\nsize = 10\nsizes = 3\n"
    )
    assert faults(toml) == [
        "f:1: names: unknown key (is name meant?)",
        "f:2: on: 'yes' is not true or false",
        "f:3: wait: 'soon' is not a span of time (write for example 15m, 2h30m, 7d or 4w)",
        "f:4: words: 'gren' is not one of red, green (is green meant?)",
        "f:5: source: unknown key (known here: empty, limits, name, nodes, on, path, wait, words)",
        "f:7: limits.cpu: 200 is not from 0 to 100",
        "f:8: limits.memory: unknown key (known here: cpu, gpu)",
        "f:9: nodes.a: size is missing",
        "f:10: nodes.a.share: -1 is below 0",
        "f:12: nodes.b.size: 10 is not from 1 to 9",
        "f:13: nodes.b.sizes: unknown key (is size meant?)",
    ]


def test_valid_values_are_converted() -> None:
    file = TomlFile(
        "name = 'n'\nempty = ''\nwait = '2h'\nwords = ['red']\n[limits]\ncpu = 3\n[nodes.\"a*\"]\nsize = 2\n"
    )
    outer = file.section(Outer, file.data)
    assert file.faults == ()
    assert outer == Outer("n", "", wait="2h", words=("red",), limits={"cpu": 3.0}, nodes={"a*": Inner(2)})


def test_error_with_several_faults_has_one_line_for_each() -> None:
    """As text it is one line, for the log: the first error and the number of the others."""
    with pytest.raises(TomlError) as caught:
        config.parse("[store]\ndbb = 'x'\n[agent]\nperiod = '0s'\nrun_dir = 'run'\n", where="c.toml")
    assert caught.value.lines == (
        "c.toml:2: store.dbb: unknown key (is db meant?)",
        "c.toml:4: agent.period: 0s is not above 0",
        "c.toml:5: agent.run_dir: run is not an absolute path",
    )
    assert str(caught.value) == "c.toml:2: store.dbb: unknown key (and 2 more)"


def test_single_fault_keeps_its_hint() -> None:
    """The command line prints it on a line of its own."""
    with pytest.raises(TomlError) as caught:
        config.parse("[store]\ndbb = 'x'\n", where="c.toml")
    assert (caught.value.lines, caught.value.hint) == (("c.toml:2: store.dbb: unknown key",), "is db meant?")


def test_comparison_of_keys_is_skipped_if_one_is_invalid() -> None:
    """An invalid limit has no order."""
    with pytest.raises(TomlError) as caught:
        config.parse("[idle]\nlow_pct = 'x'\nidle_pct = 50\n", where="c.toml")
    assert caught.value.lines == ("c.toml:2: idle.low_pct: 'x' is not a number",)


def test_control_characters_of_keys_are_escaped() -> None:
    with pytest.raises(TomlError) as caught:
        config.parse('"a\\nb" = 1\nx = 1\n', where="c.toml")
    assert caught.value.lines[0].startswith("c.toml:1: a\\nb: unknown key")


def test_text_that_is_not_toml_has_one_fault() -> None:
    file = TomlFile("[limits\n")
    assert not file.valid()
    assert (file.data, len(file.faults)) == ({}, 1)
    with pytest.raises(TomlError, match=r"f:1: not TOML: "):
        parsed("[limits\n", where="f")
    assert parsed("a = 1\n", where="f") == {"a": 1}


@pytest.mark.parametrize(
    ("value", "items"),
    [(["a", "b"], ("a", "b")), ("a", ("a",)), ([], "the list is empty"), ([""], "has an empty text in it"),
     (3, "is not a list of strings"), ([1], "is not a list of strings")],
)  # fmt: skip
def test_list_of_strings(value: Any, items: tuple[str, ...] | str) -> None:
    """A string counts as a list of one where that is allowed."""
    file = TomlFile("")
    result = file.value(TomlList(text, single=True, whole_set="everything"), value, ("key",))
    if isinstance(items, str):
        assert items in file.faults[0].message
    else:
        assert result == items


@pytest.mark.parametrize(("value", "expected"), [("90m", 5400.0), (90, 90.0), (0, 0.0), ("36500d", 3153600000.0)])
def test_span_is_text_or_a_number_of_seconds(value: object, expected: float) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, "-1 is below 0"), (10**400, "finite"), (float("nan"), "finite"), (True, "not a span"), ("36501d", "100 y")],
)
def test_invalid_span_is_rejected(value: object, message: str) -> None:
    with pytest.raises(AffinodeError, match=message):
        seconds(value)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["name", "empty", "on", "path", "wait", "words", "limits", "nodes"]), _VALUES)
def test_any_value_is_read_or_reported(key: str, value: Any) -> None:
    """No exception is raised, and a section always results."""
    file = TomlFile("")
    assert isinstance(file.section(Outer, {key: value}), Outer)
    assert file.valid() != bool(file.faults)
