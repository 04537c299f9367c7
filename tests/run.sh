#!/usr/bin/env bash
# Runs the linters and every test but those marked as nightly: those that need no cluster and, at the same time, once their
# image is built, the whole suite of the cluster on one Slurm release and the main scenarios on the other, there also those of
# cgroups with version 2. All of them run even if some fail; the exit status shows whether any failed. Tests on the cluster
# mostly wait: they are distributed over five workers, each with its own cluster, and everything else runs with lower priority.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
pytest=.venv/bin/pytest
logs=out/test-logs
mkdir -p "$logs"

# RELEASE CGROUPS MARKERS OPTION...: its output goes to a file, as two of them run at the same time. A failed test is
# repeated with an empty queue, and the summary shows it: dozens of daemons on two cores do not always meet deadlines. Ctrl-C
# also reaches these processes, although a shell makes background processes ignore it, so that they end their clusters. The
# other tests share the cores, and are repeated once.
on_cluster() {
  SLURM_RELEASE=$1 CLUSTER_CGROUPS=$2 env --default-signal=INT "$pytest" -p no:cacheprovider -m "$3" --reruns 2 tests/cluster \
    "${@:4}" >"$logs/cluster-$1-$2.log" 2>&1
}

# RELEASE: if it fails, so do all tests on that cluster.
build_image() {
  SLURM_RELEASE=$1 nice containers/cluster build >"$logs/image-$1.log" 2>&1 && return
  echo "the image of the cluster with Slurm $1 could not be built:" >&2
  tail -n 40 "$logs/image-$1.log" >&2
  return 1
}

# Both images are built at the same time, and each suite begins when its image is complete: beside the tests of five clusters,
# a build takes several times as long.
whole_suite() {
  local failed=0
  ((docker)) && { build_image 24.11 || failed=1; }
  on_cluster 24.11 v1 "cluster and not nightly" -n 5 --dist worksteal --durations=40 || failed=1
  return "$failed"
}

main_scenarios() {
  local failed=0
  ((docker)) && { build_image 26.05 || failed=1; }
  on_cluster 26.05 v1 "cluster and main" --durations=20 || failed=1
  on_cluster 26.05 v2 "cluster and main" -k test_cgroups || failed=1
  return "$failed"
}

# Without Docker these tests are skipped with that reason; with CI=true they fail.
on_clusters() {
  local failed=0 docker=0 whole
  containers/ensure-docker.sh && docker=1
  whole_suite &
  whole=$!
  main_scenarios || failed=1
  wait "$whole" || failed=1
  return "$failed"
}

echo "tests on the cluster run at the same time as the others, on two Slurm releases; their output is in $logs until the end"
on_clusters &
clusters=$!
failed=0 unclean=0
nice make --no-print-directory --keep-going --jobs=2 --output-sync lint check-types || unclean=1
nice "$pytest" -m "not cluster and not gpu and not nightly" -n 3 --dist loadfile --no-loadscope-reorder \
  --reruns 1 --durations=40 "$@" || failed=1
# Benchmarks with little data: they must not end with an error.
nice .venv/bin/python -m benchmarks --quick >"$logs/benchmarks.log" 2>&1 || { failed=1; tail -n 40 "$logs/benchmarks.log"; }
wait "$clusters" || failed=1
cat "$logs"/cluster-{24.11-v1,26.05-v1,26.05-v2}.log
((unclean)) && echo "the linters or the check of types failed: their output is above that of the tests" >&2
exit $((failed | unclean))
