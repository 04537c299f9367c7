#!/usr/bin/env bash
# Every test: those that need no cluster while its images are built, then the whole suite of the cluster on one Slurm
# release and the main scenarios on the other. All of them run, whichever fail; the status says whether any did.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
pytest=.venv/bin/pytest
log=out/cluster-images.log
mkdir -p out

building=
if containers/ensure-docker.sh; then
  {
    SLURM_RELEASE=24.11 nice containers/cluster build && SLURM_RELEASE=26.05 nice containers/cluster build
  } >"$log" 2>&1 &
  building=$!
  trap 'kill "$building" 2>/dev/null' EXIT
fi

failed=0
"$pytest" -m "not cluster and not gpu" --cov --cov-report=term:skip-covered --cov-fail-under=90 "$@" || failed=1

if [ -n "$building" ]; then
  wait "$building" || { echo "the images of the cluster could not be built:" >&2; tail -n 40 "$log" >&2; failed=1; }
  trap - EXIT
fi
SLURM_RELEASE=24.11 "$pytest" -m cluster tests/cluster || failed=1
SLURM_RELEASE=26.05 "$pytest" -m "cluster and main" tests/cluster || failed=1
exit "$failed"
