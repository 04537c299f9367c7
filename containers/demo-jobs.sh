# Real jobs of several users on the cluster in containers, as cluster-demo and record-demo-history submit them.
# Sourced; needs $here (this directory) and say().
# shellcheck shell=bash

: "${here:?}"
cluster() { "$here/cluster" "$@"; }
on_login() { cluster exec login "$@"; }

jobs=()
spool=/shared/gpu-history

submit() { # USER ACCOUNT NAME SBATCH-OPTIONS... -- WORKLOAD ARGUMENTS...
  local user=$1 account=$2 name=$3 options=()
  shift 3
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  jobs+=("$(cluster exec --user "$user" login sbatch --parsable --partition=gpu --account="$account" --job-name="$name" \
    "${options[@]}" --output=/dev/null --wrap "exec $*")")
}

workload() { echo "/usr/local/share/workloads/$1.py"; }

# About 110 s of four GPUs for each unit of SCALE.
submit_jobs() { # SCALE
  local s=$1
  submit bob language keep-warm --gres=gpu:1 --time="$s" -- "$(workload squatter)" --seconds 3600 --memory-mib 60000
  submit alice vision resnet-sweep --gres=gpu:1 -- "$(workload busy)" --seconds $((40 * s)) --memory-mib 24000
  submit carol teaching jupyter --gres=gpu:1 -- "$(workload bursty)" --burst $((2 * s)) --pause $((8 * s)) --count 6 --memory-mib 9000
  submit alice language finetune --gres=gpu:1 -- "$(workload idle_after)" --busy $((15 * s)) --idle $((25 * s)) --again $((2 * s)) \
    --memory-mib 38000
  submit bob language pretrain --gres=gpu:2 -- "$(workload multi_process)" --processes 2 --gpus 2 --busy $((25 * s)) \
    --idle $((3 * s)) --memory-mib 52000
  submit alice vision sweep --gres=gpu:1 --array=1-3 -- "$(workload task_array)" --unit $((5 * s)) --memory-mib 16000
  submit bob language too-large --gres=gpu:1 -- "$(workload out_of_memory)" --step-mib 16000 --compute "$s"
  submit carol teaching preprocess --gres=gpu:1 -- sleep $((20 * s))
  submit alice vision one-of-two --gres=gpu:2 -- "$(workload busy)" --seconds $((25 * s)) --memory-mib 30000
}

# Wait for all of $jobs; print a line of progress after each change.
wait_for_jobs() { # SECONDS
  local deadline=$((SECONDS + $1)) said='' states now list
  list=$(IFS=,; echo "${jobs[*]}")
  while :; do
    # A job that slurmctld no longer knows has ended; squeue reports an error.
    states=$(on_login squeue --noheader --array --jobs="$list" --states=PENDING,RUNNING,COMPLETING,CONFIGURING,REQUEUED \
      --format=%T 2>/dev/null || true)
    [ -n "$states" ] || break
    now="$(grep -c RUNNING <<<"$states" || true) run, $(grep -c PENDING <<<"$states" || true) wait"
    [ "$now" = "$said" ] || say "  $now"
    said=$now
    [ "$SECONDS" -lt "$deadline" ] || { say "the jobs have not ended in time: containers/cluster status"; return 3; }
    sleep 2
  done
  # Accounting records arrive slightly later.
  until [ -z "$(on_login sacct --allusers --allocations --noheader --parsable2 --jobs="$list" --format=State \
    | grep -E 'PENDING|RUNNING|COMPLETING|REQUEUED' || true)" ]; do
    [ "$SECONDS" -lt "$deadline" ] || { say "accounting does not show the ends of the jobs"; return 3; }
    sleep 0.5
  done
}

# Make the exporters close their spool files, and wait until these are converted to Parquet.
collect_samples() {
  local node part deadline=$((SECONDS + 30))
  for node in c1 c2; do
    part=$(cluster exec "$node" sh -c "cd $spool && ls -t gpu-$node-*.csv.part | head -n 1")
    # shellcheck disable=SC2016  # expanded on the node
    cluster exec "$node" sh -c 'kill -HUP "$(cat /run/slurm-affinode-exporter.pid)"'
    until cluster exec "$node" test -e "$spool/${part%.csv.part}.parquet"; do
      [ "$SECONDS" -lt "$deadline" ] || { say "the exporter of $node has not closed its file"; return 3; }
      sleep 0.5
    done
  done
}
