"""Write ``docs/metrics.md``: ``python -m slurm_affinode.analysis.metrics_doc > docs/metrics.md``."""

from __future__ import annotations

import sys

from slurm_affinode.analysis import metrics

_INTRODUCTION = """\
# What the figures mean

<!-- Generated from reports/metrics.toml by: python -m slurm_affinode.analysis.metrics_doc > docs/metrics.md -->

Hours are GPU-hours. For every row of a report that has them:

```
allocated = measured + unknown
measured  = idle + low + busy
```

A sum over runs, users, accounts, partitions, nodes or GPU models is the total. 0 is a measurement; a figure that
nothing is known about is absent.
"""


def render() -> str:
    """The whole document."""
    parts = [_INTRODUCTION, "## Rules\n"]
    parts += [f'<a id="{rule.id}"></a>\n### {rule.title}\n\n{rule.text}\n' for rule in metrics.rules().values()]
    parts.append("## Figures\n")
    for metric in metrics.load().values():
        parts.append(
            f'<a id="{metric.id}"></a>\n### {metric.name}\n\n{metric.help}\n\n'
            f"- Key: `{metric.id}`\n- Unit: {metric.unit}\n- Formula: {metric.formula}\n- Source: {metric.source}\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
