#!/usr/bin/env bash
# Every test: those that need no cluster while its images are built, then the whole suite of the cluster on one Slurm
# release and the main scenarios on the other, side by side. All of them run, whichever fail; the status says whether
# any did. Tests on the cluster mostly wait: five workers, each with a cluster of its own, share out the files.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
pytest=.venv/bin/pytest
logs=out/test-logs
mkdir -p "$logs"

building=
if containers/ensure-docker.sh; then
  {
    SLURM_RELEASE=24.11 nice containers/cluster build && SLURM_RELEASE=26.05 nice containers/cluster build
  } >"$logs/images.log" 2>&1 &
  building=$!
  trap 'kill "$building" 2>/dev/null' EXIT
fi

failed=0
"$pytest" -m "not cluster and not gpu" -n 2 --dist loadfile --no-loadscope-reorder \
  --cov --cov-report=term:skip-covered --cov-fail-under=90 "$@" || failed=1

if [ -n "$building" ]; then
  wait "$building" || { echo "the images of the cluster could not be built:" >&2; tail -n 40 "$logs/images.log" >&2; failed=1; }
  trap - EXIT
fi

# RELEASE MARKERS OPTION...: what it says goes to a file, for two of them run at the same time. A story that fails is told
# again, on a clean queue, and that is in the summary (R): dozens of daemons on two cores do not always meet deadlines.
on_cluster() {
  SLURM_RELEASE=$1 "$pytest" -p no:cacheprovider -m "$2" --reruns 2 -rR tests/cluster "${@:3}" >"$logs/cluster-$1.log" 2>&1
}
echo "the tests on the cluster run on two Slurm releases at once; what they say is in $logs until they have ended"
on_cluster 24.11 cluster -n 5 --dist loadfile --no-loadscope-reorder --durations=40 &
whole=$!
on_cluster 26.05 "cluster and main" --durations=20 || failed=1
wait "$whole" || failed=1
cat "$logs/cluster-24.11.log" "$logs/cluster-26.05.log"
exit "$failed"
