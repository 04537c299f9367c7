"""The notebook of the documentation: its cells run on the demo's synthetic data, and it is stored without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.cli.demo import DAYS, SEED
from slurm_affinode.demo.histories import build_demo, synthetic

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "report.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a kernel does, and return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr), source
    exec(compile(tree, str(NOTEBOOK), "exec"), names)  # noqa: S102 - the cells are part of the repository
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)  # noqa: S307


def test_cells_answer_their_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell shows a table, with the figures of the report that the demo writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")  # the zone of the demo
    summary = build_demo(Path("out/demo"), synthetic(days=DAYS, seed=SEED)).summary
    names: dict[str, Any] = {}
    quality, states, users, actions, demand, when, small = [run("".join(c["source"]), names) for c in cells("code")]
    assert len(quality) == len(summary["quality"]["issues"])
    assert states["GPU-hours"].to_dict() == {
        state: round(summary["total"][f"gpu_hours_{state}"], 1) for state in ("busy", "low", "idle", "unknown")
    }
    assert states["% of allocated"].sum() == pytest.approx(100, abs=0.2)
    first = summary["groups"]["user"][0]
    assert (users.index[0], users["gpu_hours_idle"].iloc[0]) == (first["name"], round(first["gpu_hours_idle"], 1))
    assert list(actions["user"]) == [action["user"] for action in summary["actions"]]
    assert demand["gpu_hours_unmet"].to_dict() == {
        row["partition"]: round(row["gpu_hours_unmet"], 1) for row in summary["unmet_demand"]["partitions"]
    }
    rows = {row["when"]: row for row in summary["working_hours"]["hours"]}
    assert when["gpu_hours_idle"].to_dict() == {kind: round(row["gpu_hours_idle"], 1) for kind, row in rows.items()}
    assert when["idle_gpus"]["other"] == round(rows["other"]["gpu_hours_idle"] / rows["other"]["hours"], 1)
    assert (small["fb_peak_gib"] <= 10).all()
    assert len(small) > 0


def test_notebook_is_stored_without_outputs() -> None:
    """And says that its data are synthetic."""
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells("code"))
    assert "**synthetic**" in "".join(cells("markdown")[0]["source"])
    headings = ["".join(cell["source"]).splitlines()[0] for cell in cells("markdown")[1:]]
    assert [heading[:5] for heading in headings] == [f"## {n}." for n in range(1, 7)]
    assert all(heading.endswith("?") for heading in headings)
