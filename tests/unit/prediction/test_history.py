"""Values of jobs that had ended: equal to a plain computation, and never of a job that still runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.prediction.history import History

ROWS = st.lists(
    st.tuples(st.integers(-1, 2), st.integers(-1, 20), st.one_of(st.none(), st.integers(1, 9))), max_size=30
)
QUERIES = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 25)), min_size=1, max_size=10)


@given(rows=ROWS, queries=QUERIES, window=st.integers(1, 5))
def test_queries_use_the_last_values_that_ended_before_the_moment(
    rows: list[tuple[int, int, int | None]], queries: list[tuple[int, int]], window: int
) -> None:
    history = History(
        np.array([row[0] for row in rows], np.int64), np.array([row[1] for row in rows], np.int64),
        np.array([np.nan if row[2] is None else row[2] for row in rows], np.float64),
    )  # fmt: skip
    keys, moments = (np.array(column, np.int64) for column in zip(*queries, strict=True))
    earlier = history.before(keys, moments)
    counts, lasts, medians = earlier.count(), earlier.last(1), earlier.quantiles(window, (0.25, 0.5))
    for number, (key, moment) in enumerate(queries):
        ended = sorted(
            ((end, value) for row_key, end, value in rows
             if key >= 0 and row_key == key and 0 <= end < moment and value is not None), key=lambda pair: pair[0],
        )  # fmt: skip
        assert counts[number] == len(ended)
        if not ended:
            assert np.isnan(lasts[number])
            assert np.isnan(medians[:, number]).all()
            continue
        assert lasts[number] == ended[-1][1]
        values = [value for _, value in ended[-window:]]
        assert np.allclose(medians[:, number], np.quantile(values, (0.25, 0.5)))
