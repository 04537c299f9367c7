"""Ingest from a Prometheus server: a fake server for rare cases, a real one for agreement."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_http import Answer, Question, serving
from polars.testing import assert_frame_equal

from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.metrics import aliases, openmetrics
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.prometheus import importer, queries
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.importer import ImportOutcome
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.metrics.schema import SAMPLES

T0 = 1_793_520_000
"""2026-11-01T08:00:00Z, seconds."""
EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)


class Api:
    """A server with series sampled every 30 s; records the queries that it receives."""

    def __init__(
        self, series: dict[str, list[dict[str, str]]], *, step_s: int = 30, until_s: int = 3600, raw: bool = True,
        names: bool = True, value: Callable[[str, int], float] = lambda metric, at: float(at % 97),
    ) -> None:  # fmt: skip
        self.series, self.step_s, self.until_s, self.raw, self.names = series, step_s, until_s, raw, names
        self.value = value
        self.trouble: Callable[[str, int, int], Answer | None] = lambda path, since, until: None
        self.windows: list[tuple[str, int, int]] = []
        """Path, start and end in seconds after ``T0``."""

    def __call__(self, question: Question) -> Answer:
        path, params = question[1], question[2]
        if path.endswith("/label/__name__/values"):
            known = [*self.series, "up", "power"]
            return self._success(known) if self.names else Answer("404 page not found", 404, "text/plain")
        if "/label/" in path:
            return self._success([])
        query = params["query"][0]
        metric = re.findall(r"\w+", query.replace("timestamp(", ""))[0]
        if path.endswith("/query"):
            if not self.raw:
                return Answer("404 page not found", 404, "text/plain")
            until = float(params["time"][0])
            since = until - float(query.partition("[")[2].partition("s]")[0])
            since_s, until_s = math.floor(since) - T0 + 1, math.floor(until) - T0
            times = range(-(-since_s // self.step_s) * self.step_s, until_s + 1, self.step_s)
        else:
            start, end, step = (float(params[name][0]) for name in ("start", "end", "step"))
            if (end - start) / step > 11_000:
                error = {
                    "status": "error",
                    "errorType": "bad_data",
                    "error": "exceeded maximum resolution of 11,000 points",
                }
                return Answer(json.dumps(error), 400)
            since_s, until_s = round(start) - T0, round(end) - T0
            times = range(since_s, until_s + 1, round(step))
        self.windows.append((path.rpartition("/")[2], since_s, until_s))
        if (answer := self.trouble(path, since_s, until_s)) is not None:
            return answer
        stamps = "timestamp(" in query
        result = [
            {"metric": {} if stamps else {"__name__": metric, **labels}, "values": [
                [T0 + at, str(T0 + at - at % self.step_s if stamps else self.value(metric, at))]
                for at in times if 0 <= at < self.until_s
            ]}
            for labels in self.series.get(metric, [])
        ]  # fmt: skip
        result = [scrape for scrape in result if scrape["values"]]
        return self._success({"resultType": "matrix", "result": result})

    def _success(self, data: Any) -> Answer:
        return Answer(json.dumps({"status": "success", "data": data}))


def dcgm(gpu: int = 0, node: str = "gpu01", **more: str) -> dict[str, str]:
    """Return the labels that Prometheus has for dcgm-exporter."""
    return {
        "gpu": str(gpu),
        "UUID": f"GPU-{node}-{gpu}",
        "Hostname": node,
        "instance": f"{node}:9400",
        "job": "dcgm",
        **more,
    }


def take(
    store: SampleStore, url: str, *, since_s: int = 0, until_s: int = 3600, match: tuple[str, ...] = (),
    step_s: float | None = None, **how: Any,
) -> ImportOutcome:  # fmt: skip
    """Ingest the samples of the server."""
    options = ReadOptions(aliases=aliases.load())
    matchers = queries.parse_matchers(match)
    question = queries.Question(
        (T0 + since_s) * 1000, (T0 + until_s) * 1000, matchers, None if step_s is None else round(step_s * 1000)
    )
    client = Client(Server(url), sleep=lambda seconds: None)
    return importer.ingest(store, client, question, options, **how)


def rows(store: SampleStore) -> pl.DataFrame:
    """Return all samples."""
    return store.scan().sort("device", "time").collect()


def test_samples_keep_their_scrape_times(store: SampleStore) -> None:
    """Raw samples are queried; consecutive windows have neither gaps nor duplicates."""
    api = Api({"DCGM_FI_DEV_GPU_UTIL": [dcgm(0), dcgm(1)]}, until_s=4 * 3600)
    with serving(judge=api) as fake:
        outcome = take(store, fake.url, until_s=4 * 3600)
    assert {path for path, _, _ in api.windows} == {"query"}
    assert len(api.windows) > 1
    assert (outcome.summary.samples, outcome.summary.new) == (960, 960)
    item = rows(store).filter(pl.col("index") == 0)
    assert item["time"].to_list() == [EIGHT + timedelta(seconds=30 * n) for n in range(480)]
    assert item["util_pct"].to_list() == [float(30 * n % 97) for n in range(480)]
    assert set(item["node"]) == {"gpu01"}


def test_given_step_uses_range_queries(store: SampleStore) -> None:
    """The points are on a fixed grid; each query stays below the limit of points of Prometheus."""
    api = Api({"DCGM_FI_DEV_GPU_UTIL": [dcgm()]}, until_s=50_000)
    with serving(judge=api) as fake:
        take(store, fake.url, since_s=7, until_s=50_000, step_s=2)
        before = rows(store)
        take(store, fake.url, since_s=3, until_s=50_000, step_s=2)
    assert {path for path, _, _ in api.windows} == {"query_range"}
    assert max(until - since for _, since, until in api.windows) / 2 < 11_000
    assert before["time"][0] == EIGHT + timedelta(seconds=8)
    assert len(rows(store)) == len(before) + 2


def test_server_without_raw_samples_uses_range_queries(store: SampleStore) -> None:
    """The scrape interval is detected and reported; if metric names cannot be listed, all known metrics are queried."""
    api = Api({"DCGM_FI_DEV_FB_USED": [dcgm()]}, raw=False, names=False, step_s=15)
    with serving(judge=api) as fake:
        outcome = take(store, fake.url)
    (file,) = outcome.summary.files
    assert file.decisions == (("reading by range queries, a point every 15 s: it gives no raw samples", 1),)
    assert outcome.summary.samples == 240


def test_too_large_query_is_split(store: SampleStore) -> None:
    """No sample is missing afterwards."""
    api = Api({"DCGM_FI_DEV_GPU_UTIL": [dcgm()]})
    error = json.dumps({"status": "error", "errorType": "execution", "error": "too many samples"})
    api.trouble = lambda path, since, until: Answer(error, 422) if until - since > 600 else None
    with serving(judge=api) as fake:
        assert take(store, fake.url).summary.samples == 120
        api.trouble = lambda path, since, until: Answer(error, 422)
        with pytest.raises(UnreachableError, match="too many samples"):
            take(store, fake.url)


def test_samples_before_a_failure_are_kept(store: SampleStore) -> None:
    """The outcome gives the time from which to continue."""
    api = Api({"DCGM_FI_DEV_GPU_UTIL": [dcgm()]}, until_s=20_000)
    api.trouble = lambda path, since, until: Answer("", 503) if until > 3600 else None
    with serving(judge=api) as fake:
        outcome = take(store, fake.url, until_s=20_000)
        assert isinstance(outcome.failure, UnreachableError)
        assert outcome.until == EIGHT + timedelta(hours=1)
        assert len(rows(store)) == 120
        api.trouble = lambda path, since, until: None
        again = take(store, fake.url, until_s=20_000)
    assert (again.failure, again.summary.duplicates) == (None, 120)


def test_labels_identify_gpu_and_jobs(store: SampleStore) -> None:
    """Copies of a series for several jobs are one sample; without a host label, the node comes from ``instance``."""
    smi = {"instance": "gpu02.example.org:9835", "job": "smi", "uuid": "GPU-9"}
    api = Api(
        {
            "DCGM_FI_DEV_GPU_UTIL": [dcgm(hpc_job="12"), dcgm(hpc_job="7"), {"instance": "gpu03:9400"}],
            "DCGM_FI_DEV_FB_FREE": [dcgm()],
            "DCGM_FI_DEV_FB_USED": [dcgm()],
            "nvidia_smi_utilization_gpu_ratio": [smi],
        },
        until_s=30,
        value=lambda metric, at: 0.5 if "ratio" in metric else 1000.0,
    )
    with serving(judge=api) as fake:
        outcome = take(store, fake.url)
    both = {row["node"]: row for row in rows(store).iter_rows(named=True)}
    assert both["gpu01"]["job"] == "12,7"
    assert both["gpu01"]["fb_total_mib"] == 2000
    assert both["gpu02"]["util_pct"] == 50
    assert outcome.summary.problem_count >= 1
    assert "names no GPU" in outcome.summary.files[0].problems[0].reason


def test_nan_and_dcgm_blank_values_are_missing(store: SampleStore) -> None:
    api = Api(
        {"DCGM_FI_DEV_GPU_UTIL": [dcgm()], "DCGM_FI_DEV_POWER_USAGE": [dcgm()]},
        until_s=90,
        value=lambda metric, at: [math.nan, 2147483632.0, 0.0][at // 30] if "UTIL" in metric else 70.0,
    )
    with serving(judge=api) as fake:
        take(store, fake.url)
    assert rows(store)["util_pct"].to_list() == [None, None, 0.0]


def test_percent_and_ratio_are_distinguished_over_the_interval(store: SampleStore) -> None:
    """DCGM has exported this metric as both; an idle hour at 1 % must not become an hour at 100 %."""
    name = "DCGM_FI_DEV_GPU_UTIL_RATIO"

    class Both(Api):
        def __call__(self, question: Question) -> Answer:
            if "max_over_time" in question[2].get("query", [""])[0]:
                result = [{"metric": dcgm(), "value": [0, "98"]}, {"metric": dcgm(node="gpu02"), "value": [0, "0.98"]}]
                return self._success({"resultType": "vector", "result": result})
            return super().__call__(question)

    with serving(judge=Both({name: [dcgm(), dcgm(node="gpu02")]}, value=lambda metric, at: 1.0)) as fake:
        take(store, fake.url)
    means = {
        row["node"]: row["util_pct"] for row in rows(store).group_by("node").agg(pl.col("util_pct").mean()).to_dicts()
    }
    assert means == {"gpu01": 1.0, "gpu02": 100.0}


def test_server_without_gpu_samples_is_rejected(store: SampleStore) -> None:
    """The error lists related metrics, if any; ``power`` of another device is not a GPU metric."""
    with serving(judge=Api({"DCGM_FI_DEV_SM_CLOCK": [dcgm()]})) as fake, pytest.raises(InputError) as caught:
        take(store, fake.url)
    assert "it has DCGM_FI_DEV_SM_CLOCK" in str(caught.value)
    with serving(judge=Api({"power": [dcgm()]})) as fake, pytest.raises(InputError, match=r'match \{a="b"\}'):
        take(store, fake.url, match=('a="b"',))
    nameless = Api({"DCGM_FI_DEV_GPU_UTIL": [{"instance": "a"}]})
    with serving(judge=nameless) as fake, pytest.raises(InputError, match=r"none of its 1 series .* names no GPU"):
        take(store, fake.url)
    assert store.days() == []


def test_dry_run_stores_nothing(store: SampleStore) -> None:
    """The samples are read and counted."""
    with serving(judge=Api({"DCGM_FI_DEV_GPU_UTIL": [dcgm()]})) as fake:
        summary = take(store, fake.url, dry_run=True).summary
    assert (summary.samples, summary.dry_run, store.days()) == (120, True, [])


# --- matchers


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ('cluster="alpha"', 'm{cluster="alpha"}'),
        ('{cluster="alpha", instance=~"gpu.*:9400",}', 'm{cluster="alpha",instance=~"gpu.*:9400"}'),
        ("a!='it\\'s'", 'm{a!="it\'s"}'),
        ('a!~`x\\d"`', 'm{a!~"x\\\\d\\""}'),
        ('a="x\\\\y\\n"', 'm{a="x\\\\y\\n"}'),
    ],
)
def test_matcher_is_parsed_and_quoted(text: str, meaning: str) -> None:
    """Matchers are parsed and written anew, so that nothing else gets into a query."""
    assert queries.selector("m", queries.parse_matchers([text])) == meaning
    assert queries.selector("a.b", queries.parse_matchers([text])).startswith('{__name__="a.b",')


@pytest.mark.parametrize(
    "text", ["", "{}", "cluster", 'a="b" c="d"', 'a="b"} or up{', 'a=="b"', 'a="b', '__name__="up"', "a=b"]
)
def test_invalid_matcher_is_rejected(text: str) -> None:
    """The error shows the text."""
    with pytest.raises(AffinodeError) as caught:
        queries.parse_matchers([text])
    assert repr(text) in str(caught.value)


# --- a real Prometheus


def history(nodes: int = 2, count: int = 300) -> str:
    """Return OpenMetrics text of nodes with two GPUs; each node has its own scrape times and consecutive jobs."""
    lines = []
    for metric, value in (
        ("DCGM_FI_DEV_GPU_UTIL", lambda n, gpu, at: (7 * at + 13 * gpu) % 101),
        ("DCGM_FI_PROF_SM_ACTIVE", lambda n, gpu, at: round((at % 50) / 50, 2)),
        ("DCGM_FI_DEV_FB_USED", lambda n, gpu, at: 1000 * n + gpu),
        ("DCGM_FI_DEV_FB_FREE", lambda n, gpu, at: 80_000),
    ):
        lines.append(f"# TYPE {metric} gauge")
        for node in range(nodes):
            for gpu in range(2):
                for at in range(count):
                    labels = dcgm(gpu, f"gpu{node:02}", cluster="alpha", hpc_job=str(100 + at // 120))
                    text = ",".join(f'{name}="{label}"' for name, label in labels.items())
                    stamp = T0 + 30 * at + 0.137 * node
                    lines.append(f"{metric}{{{text}}} {value(node, gpu, at)} {stamp:.3f}")
    return "\n".join([*lines, "# EOF", ""])


@pytest.mark.database
def test_real_prometheus_returns_the_ingested_samples(
    store: SampleStore, prometheus_of: Callable[..., str], tmp_path: Path
) -> None:
    """The samples are the same as those from the same text as a file."""
    text = history()
    outcome = take(store, prometheus_of(text), until_s=10_000)
    (tmp_path / "history.om").write_text(text)
    by_file = SampleStore(tmp_path / "by-file")
    from slurm_affinode.metrics.ingest import ingest_files

    ingest_files(by_file, [tmp_path / "history.om"], ReadOptions(aliases=aliases.load()))
    assert outcome.summary.samples == 1200
    assert_frame_equal(rows(store), rows(by_file))
    assert outcome.summary.steps_s == ((30.0, 4),)


@pytest.mark.database
def test_real_prometheus_accepts_matchers_and_limits(store: SampleStore, prometheus_of: Callable[..., str]) -> None:
    """A step of one second over hours stays below 11,000 points; an invalid expression is reported."""
    url = prometheus_of(history(count=100))
    assert take(store, url, match=('Hostname=~".*1"',)).summary.nodes == 1
    assert take(store, url, until_s=40_000, step_s=1, dry_run=True).summary.samples > 4 * 2970
    with pytest.raises(AffinodeError, match="parse error"):
        take(store, url, match=('a=~"["',))
    with pytest.raises(InputError, match="has no GPU samples"):
        take(store, url, match=('Hostname="gpu09"',))


@pytest.mark.database
def test_samples_survive_export_to_prometheus_and_ingest(
    store: SampleStore, samples: Callable[..., pl.DataFrame], prometheus_of: Callable[..., str], tmp_path: Path
) -> None:
    """Export, promtool, Prometheus and ingest preserve the samples, including hostile names.

    Only fields that a MIG instance cannot measure are not ingested again.
    """
    hostile = 'a "b"\\c\nd'
    frames = [
        samples([0.0, 50.0, None, 100.0] * 3000, step_s=10, pci="00000000:E1:00.0", index=0, model="H100", xid=31),
        samples([1.5] * 200, node="gpu02", uuid="GPU-2", mig="3", mig_profile="1g.10gb", job="12,9", power_w=70.25),
        samples([97.0] * 200, node="gpu03", uuid=None, index=1, model=hostile, cluster="beta", fb_used_mib=80000.0),
    ]
    full = pl.concat(frames).with_columns(pl.col("util_pct").alias("sm_active") / 100).select(*SAMPLES)
    store.ingest(full.cast(SAMPLES), source="test")
    since, until = EIGHT, EIGHT + timedelta(days=2)
    out = BytesIO()
    written = openmetrics.write(store, since, until, out, extra={"source": "export"}, rows_at_once=5000)
    assert written.devices == 3
    back = SampleStore(tmp_path / "back")
    outcome = take(back, prometheus_of(out.getvalue().decode()), until_s=2 * 86400, match=('source="export"',))
    has_value = pl.any_horizontal(pl.col("util_pct", "xid", "power_w", "fb_used_mib").is_not_null())
    measured = pl.when(pl.col("mig").is_null()).then(pl.col("util_pct", "power_w"))
    assert_frame_equal(rows(back), rows(store).filter(has_value).with_columns(measured))
    assert outcome.summary.problem_count == 0


@pytest.mark.database
def test_export_groups_series_in_order_of_time(store: SampleStore, samples: Callable[..., pl.DataFrame]) -> None:
    """The samples of a series are contiguous and in order of time, also over several days."""
    day = [0.0] * 3000
    store.ingest(pl.concat([samples(day, job="1"), samples(day, node="gpu02", uuid="GPU-2")]), source="test")
    out = BytesIO()
    openmetrics.write(store, EIGHT, EIGHT + timedelta(days=3), out, rows_at_once=100)
    lines = [line for line in out.getvalue().decode().splitlines() if not line.startswith("#")]
    series = [line.rpartition("}")[0] for line in lines]
    changes = sum(item != two for item, two in itertools.pairwise(series))
    assert changes == len(set(series)) - 1
    times = [float(line.split()[-1]) for line in lines if "gpu02" in line]
    assert times == sorted(times)
    assert out.getvalue().endswith(b"# EOF\n")


class LimitedApi(Api):
    """A server that refuses queries for more than ``most`` series."""

    most = 3

    def __call__(self, question: Question) -> Answer:
        path, params = question[1], question[2]
        if path.endswith("/label/instance/values"):
            every = {labels["instance"] for series in self.series.values() for labels in series if "instance" in labels}
            return self._success(sorted(every))
        whole = dict(self.series)
        query = params.get("query", [""])[0]
        if part := re.search(r'instance=~"((?:[^"\\\\]|\\\\.)*)"', query):
            pattern = re.compile(part[1].replace("\\\\", "\\"))
            self.series = {
                name: [labels for labels in series if pattern.fullmatch(labels.get("instance", ""))]
                for name, series in whole.items()
            }
        try:
            if query and max(map(len, self.series.values())) > self.most:
                error = "query processing would load too many samples into memory in query execution"
                return Answer(json.dumps({"status": "error", "errorType": "execution", "error": error}), 422)
            return super().__call__(question)
        finally:
            self.series = whole


def test_series_are_divided_if_a_short_window_is_too_much(store: SampleStore, tmp_path: Path) -> None:
    """All samples are read, also of series without the label, with no query for more than the server permits."""
    names = [dcgm(0, f"gpu{number:02}") for number in range(10)]
    unlabeled = {key: text for key, text in dcgm(1, "gpu99").items() if key != "instance"}
    series = {"DCGM_FI_DEV_GPU_UTIL": [*names, unlabeled], "DCGM_FI_DEV_FB_USED": [*names, unlabeled]}
    api = LimitedApi(series, until_s=600)
    whole = SampleStore(tmp_path / "whole")
    with serving(judge=api) as fake:
        assert take(store, fake.url, until_s=600).failure is None
        api.most = 100
        take(whole, fake.url, until_s=600)
    assert len(rows(whole)) == 11 * 20
    assert_frame_equal(rows(store), rows(whole))


def test_a_single_series_that_is_too_much_is_an_error(store: SampleStore) -> None:
    """The series cannot be divided further."""
    api = LimitedApi({"DCGM_FI_DEV_GPU_UTIL": [dcgm(number) for number in range(4)]}, until_s=600)
    with serving(judge=api) as fake, pytest.raises(UnreachableError, match="too many samples"):
        take(store, fake.url, until_s=600)


def test_refused_window_is_not_tried_again_at_once(store: SampleStore) -> None:
    """A refused length is tried again after ten windows."""
    api = Api({"DCGM_FI_DEV_GPU_UTIL": [dcgm()]}, until_s=14_400)
    error = Answer(json.dumps({"status": "error", "errorType": "timeout", "error": "query timed out"}), 503)
    api.trouble = lambda path, since, until: error if until - since > 600 else None
    with serving(judge=api) as fake:
        assert take(store, fake.url, until_s=14_400).failure is None
    refused = sum(until - since > 600 for _, since, until in api.windows)
    assert refused <= 3 + len(api.windows) // 10
