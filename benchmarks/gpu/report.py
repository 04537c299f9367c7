"""Results and goals: a table, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.published import PUBLISHED

ADDED, WAKE = 0.05, 1.2
NOT_MEASURED = "not yet measured on hardware"
COMMAND = "make bench-gpu"


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each goal with its value; ``met`` is null if it was not measured on hardware."""
    hardware = results["status"] == "measured"
    sizes = results.get("staging", [])
    largest = sizes[-1] if sizes else None

    def goal(name: str, target: str, value: float | None, met: bool) -> dict[str, Any]:
        return {"goal": name, "target": target, "value": value, "met": met if hardware and value is not None else None}

    added = max((entry["added"] for entry in sizes), default=None)
    wake = largest["wake_ratio"] if largest else None
    default = results.get("host_memory_default")
    return [
        goal("added to the driver's own time, worst size", "under 5 %", added, (added or 0) < ADDED),
        goal("wake from host memory, ratio to the driver's restore", "at most 1.2", wake, (wake or 0) <= WAKE),
        goal(
            "host memory of our own copies, ratio to the fastest", "at most 1.05",
            default and default["times_fastest"], bool(default) and default["times_fastest"] <= 1.05,
        ),
    ]  # fmt: skip


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    machine = results["machine"]
    gpu = machine["gpus"][0]
    print(
        f"\n{gpu['model']}, driver {machine['driver']}{' (EMULATED: not a measurement)' if machine['emulated'] else ''}"
    )
    print(f"{'':26}{'lock':>9}{'checkpoint':>12}{'restore':>9}{'unlock':>9}{'out':>11}{'in':>11}")
    for entry in results.get("staging", ()):
        for side in ("bare", "ours"):
            taken = entry["seconds"][side]
            cells = f"{taken['lock']:8.3f}s{taken['checkpoint']:11.3f}s{taken['restore']:8.3f}s{taken['unlock']:8.3f}s"
            rates = f"{entry['out_gbps'][side]:6.2f} GB/s{entry['in_gbps'][side]:6.2f} GB/s"
            print(f"{_gib(entry['bytes']):>10} {'driver alone' if side == 'bare' else 'our code':15}{cells}{rates}")
        print(f"{'':11}added {entry['added']:+.1%}, wake {entry['wake_ratio']:.2f} x the driver's restore")
    for text in results["left_out"]:
        print(f"  not measured: {text}")
    _copies(results.get("host_memory", ()), results.get("host_memory_default"))
    _pages(results.get("huge_pages", ()))
    print("\ncustom storage, copied to files")
    for store in results.get("custom_storage", ()):
        if isinstance(store, str):
            print(f"  not measured: {store}")
            continue
        taken = store["seconds"]
        out, back = _rate(store["bytes"], taken["out"]), _rate(store["bytes"], taken["in"])
        print(f"  {_place(store)}: {out} out, {back} in")
    print("\nseveral processes, seconds          out in turn  out at once   in in turn   in at once")
    for entry in results.get("parallel", ()):
        turn, once = entry["in_turn"], entry["at_once"]
        print(
            f"  {entry['processes']} with {_gib(entry['bytes'])} together{'':10}{turn['checkpoint_s']:10.3f}"
            f"{once['checkpoint_s']:13.3f}{turn['restore_s']:13.3f}{once['restore_s']:13.3f}"
        )
    print("\nwith CRIU and an image in files")
    for image in results.get("images", ()):
        if "why_not" in image:
            print(f"  {_gib(image['bytes'])} not measured: {image['why_not']}")
            continue
        rates = ", ".join(
            f"{name} {taken:.3f} s" if name in ("lock", "unlock") else f"{name} {_rate(image['bytes'], taken)}"
            for name, taken in image["seconds"].items()
        )
        print(f"  {_gib(image['bytes'])}, {_place(image)}: {rates}")
    print("\npublished")
    for published in PUBLISHED:
        rates = "" if published.out_gbps is None else f"{published.out_gbps:g} GB/s out, {published.in_gbps:g} in; "
        print(f"  {published.what}: {rates}{published.source}")
    print()
    for text in results["failed"]:
        print(f"FAILED: {text}")
    for entry in results["goals"]:
        in_percent = entry["target"].endswith("%")
        value = "not measured" if entry["value"] is None else f"{entry['value']:{'.1%' if in_percent else '.2f'}}"
        verdict = {True: "met", False: "MISSED", None: NOT_MEASURED}[entry["met"]]
        print(f"{entry['goal']}: {value} ({entry['target']}): {verdict}")


def _copies(kinds: Iterable[dict[str, Any]], default: dict[str, Any] | None) -> None:
    print("\ncopies over the link, GB/s                    make+first out      out again       in")
    for kind in kinds:
        if "why_not" in kind:
            print(f"  {kind['kind']:40} not available: {kind['why_not']}")
            continue
        size = kind["bytes"] / 1e9
        whole = size / (kind["make_s"] + kind["first_out_s"])
        print(f"  {kind['kind']:40}{whole:17.2f}{size / kind['out_s']:15.2f}{size / kind['in_s']:9.2f}")
    if default is not None:
        print(f"  fastest: {default['fastest']}; used for our own copies: {default['default']}")


def _pages(pages: Iterable[dict[str, Any]]) -> None:
    print("\nthe driver's staging, transparent huge pages")
    for entry in pages:
        taken = entry["seconds"]
        print(
            f"  {entry['huge_pages']:30}{_rate(entry['bytes'], taken['checkpoint'])} out,"
            f" {_rate(entry['bytes'], taken['restore'])} in"
        )


def _place(results: dict[str, Any]) -> str:
    kind = results.get("file_system", "unknown")
    return f"{results['directory']} ({kind}{', which is memory' if kind in ('tmpfs', 'ramfs') else ''})"


def _gib(size: int) -> str:
    return f"{size / 2**30:g} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"


def _rate(size: int, seconds: float) -> str:
    return f"{size / 1e9 / max(seconds, 1e-9):.2f} GB/s ({seconds:.2f} s)"


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    results = {**results, "published": [asdict(figure) for figure in PUBLISHED]}
    new.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    new.rename(path)
