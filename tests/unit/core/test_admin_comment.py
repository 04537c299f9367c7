"""The line about a job's GPUs in AdminComment: its form, and what is no such line."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.core.admin_comment import PREFIX, NodeUse, line, recognized

LINE = "gpu01, 1 of 2 nodes: 4 GPUs, busy 41 % of the measured time, idle 9.40 GPU-h, unknown 0.10 GPU-h, memory peak 61.2 GiB, suspended 2 times"  # noqa: E501
"""The line of the documentation."""

seconds = st.floats(0, 1e9)
uses = st.builds(
    NodeUse, node=st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,60}[A-Za-z0-9])?", fullmatch=True),
    nodes=st.integers(0, 9999), gpus=st.integers(1, 1024), busy_s=seconds, idle_s=seconds.map(lambda s: s + 1),
    unknown_s=st.none() | seconds, peak_mib=st.none() | st.floats(0, 1e7), suspensions=st.integers(0, 9999),
)  # fmt: skip


def test_line_has_use_and_place() -> None:
    """Node, share of the nodes, GPUs, time by activity, memory and suspensions."""
    use = NodeUse("gpu01", 2, 4, 6.53 * 3600, 9.4 * 3600, 360.0, 62_669.0, 2)
    assert line(use) == PREFIX + LINE


@given(use=uses)
@example(use=NodeUse("n", 1, 1, 1e-6, 1e9, None, None, 1))
@example(use=NodeUse("n", 1, 1, 1e9, 1e-6, 0.0, 0.001, 0))
def test_every_line_is_recognized(use: NodeUse) -> None:
    """Without its prefix, which names the program that shows it."""
    assert PREFIX + str(recognized(line(use))) == line(use)


@pytest.mark.parametrize(
    "comment",
    [
        None, "", "JS1:H4sIAAA", LINE, PREFIX, f"{PREFIX}gpu01: 1 GPU", f"{PREFIX}{LINE}\n", f"JS1:x {PREFIX}{LINE}",
        f"{PREFIX}{LINE}; see <b>ticket 7</b>", f"{PREFIX}{LINE}".replace("gpu01", "\x1b[31mgpu01"),
        f"{PREFIX}{LINE}".replace("gpu01", "<script>"), f"{PREFIX}{LINE}".replace("9.40", "٩"),
        f"{PREFIX}{LINE}".replace("9.40", "9" * 600),
    ],
)  # fmt: skip
def test_text_of_others_is_not_recognized(comment: str | None) -> None:
    """Another program's, an administrator's, or the line with anything added."""
    assert recognized(comment) is None
