"""SeriesPoints of Prometheus' JSON that are read as columns are those that ``json`` decodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.metrics.readers.json_points import SeriesPoints, decoded, joined

TIMES = st.one_of(
    st.integers(0, 2 * 10**9), st.floats(0, 2e9), st.sampled_from((-1, 1793520000.25, 10**30, True, None, "5"))
)
VALUES = st.one_of(st.sampled_from(("0", "97", "NaN", "+Inf", "1e3", "")), st.text(max_size=4))
POINTS = st.lists(st.tuples(TIMES, VALUES).map(list), max_size=4)
SERIES = st.builds(
    lambda labels, points: {"metric": labels, "values": points},
    st.dictionaries(st.sampled_from(("__name__", "values", "x")), st.text(max_size=12), max_size=3), POINTS,
)  # fmt: skip
DOCUMENTS = st.lists(
    st.lists(SERIES, max_size=4).map(lambda series: {"data": {"result": series}}), min_size=1, max_size=3
)


def plain(value: Any) -> Any:
    """Return a document with pairs in place of ``SeriesPoints``, and numbers of 64 bits, which times are."""
    if isinstance(value, SeriesPoints):
        return [[time, text] for time, text in zip(value.times, value.values, strict=True)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) is int:
        return float(value)
    return [plain(item) for item in value] if isinstance(value, list) else value


@example(documents=[{"data": {"result": [{"metric": {}, "values": [[10**30, "0"]]}]}}], ascii=False, damaged=False)
@given(DOCUMENTS, st.booleans(), st.booleans())
def test_documents_are_those_of_json(documents: list[Any], ascii: bool, damaged: bool) -> None:
    """Covers labels and values of any text, and times of any type; other points leave the text to ``json``."""
    text = "\n".join(json.dumps(document, separators=(",", ":"), ensure_ascii=ascii) for document in documents)
    text = text[: len(text) // 2] if damaged else text
    result = decoded(text.encode("utf-8", "replace"))
    if result is None:
        return
    assert plain(result) == [plain(json.loads(line)) for line in text.encode("utf-8", "replace").decode().split("\n")]


@pytest.mark.parametrize(
    "points",
    [
        '[[1,"a\\"b"]]', '[[1,"a\\\\"]]', '[[01,"5"]]', '[[1.,"5"]]', '[[.5,"5"]]', '[[+1,"5"]]', '[[1,"5"],]',
        '[[1,"5"]',
        '[[1,"5"],[2]]', '[[1,5]]', '[[1, "5"]]', '[["1","5"]]', '[[1,"5","6"]]', '[[]]', '[[1,"]]"]]', '[[1,"\n"]]',
        '[["a"]]',
        '[[-Infinity,"5"]]', '[[1,"5"]],"x":-Infinity', '[[1_0,"5"]]', '[[NaN,"5"]]',
    ],
)  # fmt: skip
def test_other_points_are_left_to_json(points: str) -> None:
    """Whether they are JSON or not."""
    sound = '{"metric":{},"values":[[1,"5"]]}'
    assert decoded(f'{{"result":[{sound},{{"values":{points}}}]}}'.encode()) is None


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.just("5")).map(list), min_size=1, max_size=3), min_size=1, max_size=4
    )
)
@example([[[1, "5"]], [[2, "5"]]])
def test_points_of_all_series_are_joined(series: list[list[list[Any]]]) -> None:
    """In their order; not if one of them was left out."""
    text = json.dumps([{"values": points} for points in series], separators=(",", ":"))
    (result,) = decoded(text.encode()) or ()
    points = [scrape["values"] for scrape in result]
    columns = joined(points)
    assert columns is not None
    assert columns.times.to_list() == [time for each in series for time, _ in each]
    if len(points) > 2:
        assert joined([points[0], points[2]]) is None
