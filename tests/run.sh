#!/usr/bin/env bash
# Every test: those that need no cluster, and beside them, once their images are built, the whole suite of the cluster
# on one Slurm release and the main scenarios on the other. All of them run, whichever fail; the status says whether any
# did. Tests on the cluster mostly wait: five workers, each with a cluster of its own, share them out, and what
# computes beside them is nice to them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
pytest=.venv/bin/pytest
logs=out/test-logs
mkdir -p "$logs"

# RELEASE MARKERS OPTION...: what it says goes to a file, for two of them run at the same time. A story that fails is
# told again, on a clean queue, and that is in the summary: dozens of daemons on two cores do not always meet
# deadlines. Ctrl-C is for these, too, though a shell has what runs beside it ignore that: they end their clusters.
# The tests beside them share these cores, and are told again once.
on_cluster() {
  SLURM_RELEASE=$1 env --default-signal=INT "$pytest" -p no:cacheprovider -m "$2" --reruns 2 tests/cluster "${@:3}" \
    >"$logs/cluster-$1.log" 2>&1
}

# RELEASE: where that fails, so does each of its tests.
build_image() {
  SLURM_RELEASE=$1 nice containers/cluster build >"$logs/image-$1.log" 2>&1 && return
  echo "the image of the cluster with Slurm $1 could not be built:" >&2
  tail -n 40 "$logs/image-$1.log" >&2
  return 1
}

# Without Docker each of their tests is skipped, and says so; with CI=true it fails. The longer suite does not wait for
# the image of the other.
on_clusters() {
  local failed=0 docker=0 whole
  containers/ensure-docker.sh && docker=1
  if ((docker)); then build_image 24.11 || failed=1; fi
  on_cluster 24.11 cluster -n 5 --dist worksteal --durations=40 &
  whole=$!
  if ((docker)); then build_image 26.05 || failed=1; fi
  on_cluster 26.05 "cluster and main" --durations=20 || failed=1
  wait "$whole" || failed=1
  return "$failed"
}

echo "tests on the cluster run beside the others, on two Slurm releases at once; what they say is in $logs until the end"
on_clusters &
clusters=$!
failed=0
nice "$pytest" -m "not cluster and not gpu" -n 3 --dist loadfile --no-loadscope-reorder \
  --reruns 1 --cov --cov-report=term:skip-covered --cov-fail-under=90 "$@" || failed=1
wait "$clusters" || failed=1
cat "$logs/cluster-24.11.log" "$logs/cluster-26.05.log"
exit "$failed"
