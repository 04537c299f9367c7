"""Texts by code: formats, parts that are left out, errors."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_affinode.base.text_templates import TextTable, filled, placeholders


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("{a:.1f} of {b}", {"a": 2, "b": "x"}, "2.0 of x"),
        ("{a:span}, {b:percent}", {"a": 90, "b": 0.46}, "1m 30s, 46 %"),
        ("{a:figure}, {b:size}", {"a": 12345.6, "b": 2.0**30}, "12,346, 1 GiB"),
        ("{a:count process processes}", {"a": 1.0}, "1 process"),
        ("{a:count process processes}", {"a": 0}, "0 processes"),
        ("they {a:word holds hold}", {"a": 2}, "they hold"),
        ("{a:if}only if it is known", {"a": True}, "only if it is known"),
        ("{a:if}only if it is known", {"a": None}, None),
        ("{a} is not known", {"a": None}, None),
        (["begin", ", {a} in the middle", ", {b} at the end"], {"a": None, "b": 0}, "begin, 0 at the end"),
    ],
)
def test_template_is_filled(template: Any, values: dict[str, Any], text: str | None) -> None:
    """A part with an unknown value is left out; 0 is a value."""
    assert filled(template, values) == text


def test_value_that_is_not_given_is_an_error() -> None:
    """It is no unknown value: the detector and the text do not fit together."""
    with pytest.raises(KeyError, match="b"):
        filled("{a} {b}", {"a": 1})


def test_placeholders_of_all_parts_are_returned() -> None:
    assert placeholders(["{a:.1f}", " and {b:span}", "."]) == {"a", "b"}


def test_codes_name_table_and_key() -> None:
    table = TextTable({"idle": {"summary": "idle for {s:span}", "rule": "..."}})
    assert list(table.codes()) == ["idle.summary", "idle.rule"]
    assert table.text("idle.summary", {"s": 60}) == "idle for 1m"
    with pytest.raises(KeyError):
        table.entry("idle.other")


def test_texts_of_a_list_leave_out_those_with_unknown_values() -> None:
    table = TextTable({"doubt": {"all": ["{a:if}first", ["second", " of {b}"], "{b} is third"]}})
    assert table.texts("doubt.all", {"a": None, "b": None}) == ("second",)
    assert table.texts("doubt.all", {"a": True, "b": 2}) == ("first", "second of 2", "2 is third")
