#!/usr/bin/env bash
# One side of moving a checkpointed process to another node: run as PID 1 of new PID and mount namespaces, which represent
# the node.
#   criu-roundtrip.sh dump|restore BUILD WORK PYTHON PROGRAM
# CRIU selects the criu to use. The program creates WORK/ready when it has written GPU memory, and compares it when WORK/go exists.
set -euo pipefail
side=$1 build=$2 work=$3 python=$4 program=$5
criu=${CRIU:-criu}
export LD_LIBRARY_PATH=

# Inherited descriptors belong to mounts that do not exist here.
for fd in /proc/self/fd/*; do
  fd=${fd##*/}
  if [ "$fd" -gt 2 ] && [ "$fd" -ne 255 ]; then eval "exec $fd>&-"; fi
done
mount --make-rprivate /
mount -t proc proc /proc
mkdir -p /run/gpu-emulator
mount -t tmpfs none /run/gpu-emulator
"$build/gpu-emulatorctl" init --gpus 2 --seed "$side"

checkpoint() {
  LD_LIBRARY_PATH=$build "$python" "$program" checkpoint "$@"
}

if [ "$side" = dump ]; then
  mkdir -p "$work/refused" "$work/image"
  LD_LIBRARY_PATH=$build setsid "$python" "$program" work "$work" </dev/null >"$work/output" 2>&1 &
  pid=$!
  until [ -e "$work/ready" ]; do
    kill -0 "$pid"
    sleep 0.05
  done
  # A process that holds a GPU cannot be dumped.
  if "$criu" dump -t "$pid" -D "$work/refused" -o log --shell-job; then
    echo "the process was dumped with its GPU" >&2
    exit 1
  fi
  checkpoint "$pid" suspend
  "$criu" dump -t "$pid" -D "$work/image" -o log --shell-job
  wait "$pid" || true # criu ends what it has dumped
else
  # Keeps the PIDs of criu and its helpers apart from those in the image.
  echo 20000 >/proc/sys/kernel/ns_last_pid
  "$criu" restore -D "$work/image" -o log --shell-job --restore-detached --pidfile "$work/pid"
  checkpoint "$(cat "$work/pid")" resume
  "$build/gpu-emulatorctl" show --json >"$work/show.json"
  touch "$work/go"
  until [ -e "$work/done" ]; do
    kill -0 "$(cat "$work/pid")"
    sleep 0.05
  done
fi
