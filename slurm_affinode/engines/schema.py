"""The schema of engine samples, which all readers of engine metrics produce.

A sample is one scrape of one engine: one row, also if the scrape failed. ``None`` is not exported or not read; 0 is a
value of the engine. Counters are as exported: they start again with the engine, and are not converted to rates here.
"""

from __future__ import annotations

import polars as pl

from slurm_affinode.engines.metric_table import COUNTERS
from slurm_affinode.metrics.schema import TIME

__all__ = ["BUCKETS", "COUNTERS", "IDENTITY", "METRICS", "OWNER", "SAMPLES"]

IDENTITY: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "node": pl.String(),  # short host name, as Slurm names nodes
    "address": pl.String(),  # host and port of the endpoint, or the label "instance"
    "engine": pl.String(),  # a table of engines.toml: "vllm", "sglang", "tgi", "triton", "llamacpp"
    "model": pl.String(),  # name under which the model is served: chosen by the user
    "rank": pl.String(),  # of several engines behind one address (data parallel): their label, else None
}
"""Identify an engine. Together with the time they identify a sample."""

OWNER: dict[str, pl.DataType] = {
    "job": pl.String(),  # ID of the Slurm job
    "user": pl.String(),
    "gpus": pl.String(),  # UUIDs, sorted, joined by ","
}

BUCKETS = pl.List(pl.Struct({"le": pl.Float64(), "count": pl.Float64()}))
"""A histogram: cumulative counts of requests by upper bound, ascending, the last one infinite; a counter."""

METRICS: dict[str, pl.DataType] = {
    "scrape_s": pl.Float64(),  # how long the scrape took
    "error": pl.String(),  # why the scrape failed; all other metrics are None then
    # State at the time of the scrape
    "running": pl.Float64(),  # requests in the batch
    "waiting": pl.Float64(),  # requests in the queue
    "waiting_capacity": pl.Float64(),  # of these, due to lack of capacity
    "swapped": pl.Float64(),  # requests swapped to host memory
    "kv_usage": pl.Float64(),  # 0-1, share of the KV cache in use
    "host_kv_usage": pl.Float64(),  # 0-1, of the KV cache in host memory
    "asleep": pl.Boolean(),  # the engine is in its sleep mode
    # Configuration
    "kv_tokens": pl.Float64(),  # capacity of the KV cache in tokens
    "block_size": pl.Float64(),  # tokens in a block of the KV cache
    "max_running": pl.Float64(),  # most requests in a batch
    "memory_share": pl.Float64(),  # 0-1, share of GPU memory that the engine may allocate
    # Counters
    "preemptions": pl.Float64(),  # requests preempted or retracted
    "prompt_tokens": pl.Float64(),  # prompt tokens processed
    "cached_tokens": pl.Float64(),  # prompt tokens taken from the prefix cache
    "generation_tokens": pl.Float64(),
    "finished": pl.Float64(),  # requests completed
    "failed": pl.Float64(),  # requests ended by an error, or aborted
    "rejected": pl.Float64(),  # requests not admitted
    "ttft_s": pl.Float64(),  # sum of times to first token
    "ttft_count": pl.Float64(),
    "token_latency_s": pl.Float64(),  # sum of times between output tokens
    "token_latency_count": pl.Float64(),
    "e2e_s": pl.Float64(),  # sum of times from arrival to the end of a request
    "e2e_count": pl.Float64(),
    "queue_s": pl.Float64(),  # sum of times in the queue
    "queue_count": pl.Float64(),
    "prefill_s": pl.Float64(),  # sum of times in prefill
    "decode_s": pl.Float64(),  # sum of times in decode
    "prompt_length": pl.Float64(),  # sum of prompt lengths of completed requests
    "prompt_length_count": pl.Float64(),
    "generation_length": pl.Float64(),  # sum of output lengths of completed requests
    "generation_length_count": pl.Float64(),
    "prompt_lengths": BUCKETS,
    "generation_lengths": BUCKETS,
    # The process that serves the endpoint
    "rss_bytes": pl.Float64(),
    "cpu_s": pl.Float64(),  # counter
    "start_time": pl.Float64(),  # seconds since the epoch
    "open_files": pl.Float64(),
    "uncollectable": pl.Float64(),  # counter: objects that Python's garbage collector could not free
    # After the end of the server, from this project's exporter
    "orphaned_processes": pl.Float64(),  # processes of the engine that are left on GPUs in the running job
    "orphaned_memory_mib": pl.Float64(),  # GPU memory that they hold
}

SAMPLES: dict[str, pl.DataType] = {**IDENTITY, "time": TIME, **OWNER, **METRICS}
