"""Tests of the join, also with a library that checks memory accesses."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_affinode.analysis.join import native

if checked := os.environ.get("CHECKED_LIBRARY"):
    native.LIBRARY = Path(checked)
