"""The recordings of serving engines as frames of samples, and what the client did."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import polars as pl

from slurm_affinode.metrics.serving.schema import SAMPLES

VLLM = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prompt_tokens_cached_total": "cached_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:request_success_total": "finished",
    "vllm:time_to_first_token_seconds_sum": "ttft_s",
    "vllm:time_to_first_token_seconds_count": "ttft_count",
    "vllm:inter_token_latency_seconds_sum": "token_latency_s",
    "vllm:inter_token_latency_seconds_count": "token_latency_count",
    "vllm:e2e_request_latency_seconds_sum": "e2e_s",
    "vllm:e2e_request_latency_seconds_count": "e2e_count",
    "vllm:request_queue_time_seconds_sum": "queue_s",
    "vllm:request_queue_time_seconds_count": "queue_count",
    "vllm:request_prefill_time_seconds_sum": "prefill_s",
    "vllm:request_decode_time_seconds_sum": "decode_s",
    "vllm:request_prompt_tokens_sum": "prompt_length",
    "vllm:request_prompt_tokens_count": "prompt_length_count",
    "vllm:request_generation_tokens_sum": "generation_length",
    "vllm:request_generation_tokens_count": "generation_length_count",
}
LLAMACPP = {
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
    "llamacpp:prompt_tokens_total": "prompt_tokens",
    "llamacpp:prompt_tokens_cached_total": "cached_tokens",
    "llamacpp:tokens_predicted_total": "generation_tokens",
    "llamacpp:prompt_seconds_total": "prefill_s",
    "llamacpp:tokens_predicted_seconds_total": "decode_s",
}
PROCESS = {
    "process_resident_memory_bytes": "rss_bytes",
    "process_cpu_seconds_total": "cpu_s",
    "process_start_time_seconds": "start_time",
    "process_open_fds": "open_files",
    "python_gc_objects_uncollectable_total": "uncollectable",
}
FAMILIES = VLLM | LLAMACPP | PROCESS


def read(directory: Path, name: str) -> pl.DataFrame:
    """Return the samples of a recording. Ends other than ``abort`` and ``error`` are finished requests."""
    rows: list[dict[str, object]] = []
    for line in gzip.decompress((directory / f"{name}.prom.gz").read_bytes()).decode().splitlines():
        if found := re.match(r"# scrape (\d+) (took|failed after) ([\d.]+)s(?:: (.*))?", line):
            rows.append({"time": int(found[1]), "scrape_s": float(found[3]), "error": found[4]})
        elif line and line[0] != "#":
            whole, value, _ = line.rsplit(" ", 2)
            family, _, labels = whole.partition("{")
            row, number = rows[-1], float(value)
            if family == "vllm:cache_config_info":
                info = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                row["block_size"], row["kv_tokens"] = float(info["block_size"]), float(info["kv_cache_size_tokens"])
            elif family == "vllm:engine_sleep_state":
                row["asleep"] = bool(row.get("asleep")) or (number == 1 and "awake" not in labels)
            elif field := FAMILIES.get(family):
                if 'finished_reason="abort"' in labels or 'finished_reason="error"' in labels:
                    field = "failed"
                row[field] = number + row.get(field, 0.0)  # type: ignore[operator]
    engine = name.partition("-")[0] if not name.startswith("llama") else "llamacpp"
    frame = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        pl.col("time").cast(pl.Datetime("ms", "UTC")), cluster=pl.lit("lab"), node=pl.lit("gpu01"),
        address=pl.lit("gpu01:8000"), engine=pl.lit(engine), model=pl.lit("tiny"), job=pl.lit("77"), user=pl.lit("ada"),
    )  # fmt: skip
    return conform(frame)


def conform(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with exactly the columns of a sample."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SAMPLES.items()
    )


def phases(directory: Path, name: str) -> list[tuple[int, int, float]]:
    """Return the phases of the client: begin and end in ms since the epoch, and requests/s."""
    rows = [
        json.loads(line)
        for line in gzip.decompress((directory / f"{name}.requests.jsonl.gz").read_bytes()).decode().splitlines()
    ]
    begun = [row for row in rows if "phase_begins" in row]
    return [(row["at_ms"], row["at_ms"] + int(row["seconds"] * 1000), row["rate"]) for row in begun]
