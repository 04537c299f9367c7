"""Options for the parameters of a modeled inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from slurm_affinode.cli.options import NumberInRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_affinode.traces.engine_model import EngineModel

_FIELDS = {
    "kv_tokens": ("kv_tokens", 1.0), "max_running": ("max_running", 1.0), "iteration_ms": ("base_s", 1e-3),
    "request_us": ("per_request_s", 1e-6), "prefill_us": ("per_prefill_token_s", 1e-6),
}  # fmt: skip
"""Parameter of the command -> field of ``EngineModel``, and its unit in that of the field."""


def engine_options(defaults: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return a decorator that adds the options; without one its parameter is ``None``.

    ``defaults``: parameter -> default as text, for the help.
    """
    kinds: dict[str, tuple[click.ParamType[Any], str, str]] = {
        "kv_tokens": (click.IntRange(1, 10**12), "N", "Capacity of an engine's KV cache in tokens"),
        "max_running": (click.IntRange(1, 65_536), "N", "Most requests in a batch"),
        "iteration_ms": (NumberInRange(0.001, 60_000), "MS", "Time of an iteration with an empty batch"),
        "request_us": (NumberInRange(0, 1_000_000), "US", "Time that a running request adds to an iteration"),
        "prefill_us": (NumberInRange(0, 1_000_000), "US", "Time that a token of a prompt adds to an iteration"),
    }

    def decorate(function: Any) -> Any:
        for name, (kind, metavar, text) in reversed(kinds.items()):
            option = f"--{name.replace('_', '-')}"
            function = click.option(
                option, type=kind, metavar=metavar, help=f"{text} [default: {defaults[name]}]"
            )(function)  # fmt: skip
        return function

    return decorate


def default_texts(engine: EngineModel) -> dict[str, str]:
    """Return the parameters of an engine as texts, for ``engine_options``."""
    return {name: f"{getattr(engine, field) / unit:.10g}" for name, (field, unit) in _FIELDS.items()}


def engine_of(engine: EngineModel, values: Mapping[str, float | None]) -> EngineModel:
    """Return ``engine`` with the parameters that were given, of the parameters of a command."""
    changes: dict[str, Any] = {}
    for name, (field, unit) in _FIELDS.items():
        value = values[name]
        if value is not None:
            changes[field] = value if unit == 1 else value * unit
    return replace(engine, **changes)
