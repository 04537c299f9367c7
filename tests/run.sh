#!/usr/bin/env bash
# Every test: those that need no cluster while its images are built, then the whole suite of the cluster on one Slurm
# release and the main scenarios on the other. All of them run, whichever fail; the status says whether any did.
# Tests on the cluster mostly wait, so they run in two lanes, each with clusters of its own.
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
"$pytest" -m "not cluster and not gpu" --cov --cov-report=term:skip-covered --cov-fail-under=90 "$@" || failed=1

if [ -n "$building" ]; then
  wait "$building" || { echo "the images of the cluster could not be built:" >&2; tail -n 40 "$logs/images.log" >&2; failed=1; }
  trap - EXIT
fi

# What suspends, checkpoints or kills jobs is the second lane; all else is the first.
second=()
others=()
for file in tests/cluster/test_*.py; do
  case "$file" in
    */test_agent.py | */test_checkpoint.py | */test_suspend*.py | */test_zombie*.py) second+=("$file") ;;
    *) others+=("--ignore=$file") ;;
  esac
done
first=("${second[@]/#/--ignore=}")

first_lane() {
  SLURM_RELEASE=24.11 "$pytest" -p no:cacheprovider -m cluster tests/cluster "${first[@]}"
  local status=$?
  SLURM_RELEASE=26.05 "$pytest" -p no:cacheprovider -m "cluster and main" tests/cluster && return "$status"
}
second_lane() {
  SLURM_RELEASE=24.11 "$pytest" -p no:cacheprovider -m cluster tests/cluster "${others[@]}"
}
echo "the tests on the cluster run in two lanes; what they say is in $logs until they have ended"
first_lane >"$logs/cluster-1.log" 2>&1 &
one=$!
second_lane >"$logs/cluster-2.log" 2>&1 &
two=$!
wait "$one" || failed=1
cat "$logs/cluster-1.log"
wait "$two" || failed=1
cat "$logs/cluster-2.log"
exit "$failed"
