"""Ingest a cluster with the product, analyze it, and compare each figure with that of the rules."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from click.testing import CliRunner

from oracle import formats, rules
from oracle.model import Cluster
from slurm_affinode.analysis.result import WasteQuery, WasteResult
from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.main import cli
from slurm_affinode.pipeline import report

Writer = Callable[[Cluster], str]

ACCOUNTING: dict[str, Writer] = {"sacct.txt": formats.sacct_text, "sacct.json": formats.sacct_json}
WAYS: dict[str, tuple[str, Writer, str]] = {
    "exposition text": ("gpu.prom", formats.exposition, "sacct.txt"),
    "CSV": ("gpu.csv", formats.table, "sacct.txt"),
    "range query": ("gpu.json", formats.range_query, "sacct.json"),
}
"""Name -> file of GPU metrics, its writer, and the file of accounting."""

_RELATIVE, _ABSOLUTE = 2e-6, 2e-6


class _IngestError(Exception):
    """A valid input was not ingested."""


def differences(cluster: Cluster) -> list[str]:
    """Return where the figures of the product differ from the rules."""
    read = {"sacct.txt": rules.report(rules.as_read(cluster)), "sacct.json": rules.report(cluster)}
    result: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="oracle-") as directory:
        states = {name: _with_accounting(cluster, name, Path(directory)) for name in ACCOUNTING}
        for way, (name, write, accounting) in WAYS.items():
            state, expected = Path(directory) / "state", read[accounting]
            shutil.copytree(states[accounting], state)
            try:
                if any(gpu.samples for gpu in cluster.gpus):
                    _ingest("gpu", Path(directory) / name, write(cluster), state, cluster)
                    if cluster.neighbor:
                        other = write(_neighbor(cluster))
                        _ingest("gpu", Path(directory) / f"other-{name}", other, state, cluster, NEIGHBOR)
                lines = [*_compared(expected, _analyzed(cluster, state))]
            except report.NoAccountingError:  # no job ran in the interval
                lines = [f"no job run, by the rules {len(expected.runs)}"] if expected.runs else []
            except (AffinodeError, _IngestError) as error:
                lines = [str(error)]
            shutil.rmtree(state)
            for line in lines:
                result.setdefault(line, []).append(way)
    return [f"{'all formats' if len(ways) == len(WAYS) else ', '.join(ways)}: {line}" for line, ways in result.items()]


def _with_accounting(cluster: Cluster, name: str, directory: Path) -> Path:
    """Return a state directory with ingested accounting and recorded GPU IDs."""
    state = directory / f"state-of-{name}"
    shutil.copytree(_empty_state(), state)
    _ingest("sacct", directory / name, ACCOUNTING[name](cluster), state, cluster)
    if cluster.neighbor:
        text = ACCOUNTING[name](_neighbor(cluster)).replace("larch", NEIGHBOR)
        _ingest("sacct", directory / f"other-{name}", text, state, cluster, NEIGHBOR)
    if cluster.recorded:
        _ingest("allocations", directory / "recorded.csv", formats.recorded(cluster), state, cluster)
    return state


def _analyzed(cluster: Cluster, state: Path) -> WasteResult:
    only = ("larch",) if cluster.neighbor else ()
    query = WasteQuery(*(datetime.fromtimestamp(t, UTC) for t in (cluster.since, cluster.until)), clusters=only)
    config = configuration.load(None, state_dir=state)
    return report.analyse_stored(config, query, now=datetime.fromtimestamp(cluster.now, UTC))


@functools.cache
def _empty_state() -> Path:
    """Return a state directory with an empty database; creating the tables takes longer than a comparison."""
    directory = Path(tempfile.mkdtemp(prefix="oracle-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    CliRunner().invoke(cli, ["db", "upgrade", "--state", str(directory)], catch_exceptions=False)
    return directory


NEIGHBOR = "fir"


def _neighbor(cluster: Cluster) -> Cluster:
    """Return another cluster with the same names: all of its GPUs are idle, and its jobs have one GPU."""
    gpus = [
        replace(gpu, samples=[replace(s, values=dict.fromkeys(s.values, 0.0), jobs=[]) for s in gpu.samples])
        for gpu in cluster.gpus
    ]
    return replace(cluster, gpus=gpus, runs=[replace(run, gpus=1, suspended=0) for run in cluster.runs])


def _ingest(kind: str, path: Path, text: str, state: Path, cluster: Cluster, name: str = "larch") -> None:  # noqa: PLR0917
    path.write_text(text, encoding="utf-8")
    arguments = ["ingest", kind, "--state", str(state), "--strict", "--timezone", cluster.zone, "--cluster", name]
    done = CliRunner().invoke(cli, [*arguments, str(path)], catch_exceptions=False, standalone_mode=False)
    if done.return_value:
        raise _IngestError(f"{path.name}: exit status {done.return_value}: {done.output}")


def _compared(expected: rules.Report, result: WasteResult) -> Iterator[str]:
    if result.total["jobs"] != len(expected.runs):
        yield f"total: jobs: {result.total['jobs']}, by the rules {len(expected.runs)}"
    rows = {(row["job_id"], int(row["submit"].timestamp())): row for row in result.jobs.to_dicts()}
    for key in rows.keys() - expected.runs.keys():
        yield f"job {key[0]}: reported, but no run with GPUs by the rules"
    for key, figures in expected.runs.items():
        name = f"job {key[0]} submitted {datetime.fromtimestamp(key[1], UTC):%FT%TZ}"
        if key not in rows:
            yield f"{name}: not reported"
            continue
        yield from _figures(name, asdict(figures), rows[key])
        kinds = sorted(set(expected.mapping[key].values())) or ["unknown"]
        if len(kinds) == 1 and rows[key]["mapping"] != kinds[0]:
            yield f"{name}: mapping: {rows[key]['mapping']}, by the rules {json.dumps(expected.mapping[key])}"

    yield from _figures("total", asdict(expected.total), dict(result.total))


def _figures(name: str, expected: dict[str, float | None], actual: dict[str, object]) -> Iterator[str]:
    for figure, expected_value in expected.items():
        if figure not in actual:
            continue
        value = actual[figure]
        if expected_value is None or value is None:
            same = expected_value is value
        else:
            same = abs(float(str(value)) - expected_value) <= _ABSOLUTE + _RELATIVE * abs(expected_value)
        if not same:
            yield f"{name}: {figure}: {value}, by the rules {expected_value}"
