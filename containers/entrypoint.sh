#!/usr/bin/env bash
# Runs one role of the cluster in the foreground: cluster-entrypoint ROLE
#   mariadb     the accounting database
#   slurmdbd    Slurm's accounting daemon
#   slurmctld   the controller; makes homes, accounts and users when it first starts
#   compute     slurmd; GPUS=N emulated GPUs (0: none) and, where there are some, slurm-affinode exporter and agent
#   login       munge and the commands, nothing else
#   prometheus  scrapes the exporters of the compute nodes
# It waits for what its role needs, with a deadline, so that containers may start in any order and be restarted alone.
set -euo pipefail

wait_s=120

say() { echo "entrypoint: $*" >&2; }

wait_for_port() { # HOST PORT
  local waited=0
  until (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; do
    [ "$waited" -lt $((wait_s * 5)) ] || { say "no answer from $1:$2 after $wait_s s"; return 1; }
    sleep 0.2
    waited=$((waited + 1))
  done
}

# The key lies on a volume that all containers share; the first one makes it.
start_munge() {
  local key=/etc/munge/munge.key
  chown munge:munge /etc/munge
  chmod 0700 /etc/munge
  (
    flock 8
    if [ ! -s "$key" ]; then
      (umask 077 && head -c 1024 /dev/urandom >"$key.new")
      chown munge:munge "$key.new"
      chmod 0400 "$key.new"
      mv "$key.new" "$key"
    fi
  ) 8>/etc/munge/.lock
  install -d -o munge -g munge -m 0755 /run/munge
  rm -f /run/munge/*
  # Two threads, because Slurm's daemons and jobs send many requests.
  setpriv --reuid munge --regid munge --init-groups munged --num-threads 2
}

# A killed daemon leaves its PID file behind, and its PID may have been reused.
prepare_run() {
  install -d -o slurm -g slurm -m 0755 /run/slurm /var/log/slurm
  rm -f /run/slurm*.pid
}

role_mariadb() {
  local data=/var/lib/mysql
  install -d -o mysql -g mysql -m 0755 "$data" /run/mysqld
  if [ ! -d "$data/mysql" ]; then
    mariadb-install-db --user=mysql --datadir="$data" --skip-test-db --auth-root-authentication-method=socket \
      --innodb-log-file-size=32M >/dev/null
  fi
  cat >/run/mysqld/init.sql <<'SQL'
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'%' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'%';
SQL
  exec mariadbd --user=mysql --datadir="$data" --bind-address=0.0.0.0 --init-file=/run/mysqld/init.sql \
    --socket=/run/mysqld/mysqld.sock --innodb-buffer-pool-size=1G --innodb-log-file-size=32M \
    --innodb-lock-wait-timeout=900 --innodb-snapshot-isolation=OFF --innodb-flush-log-at-trx-commit=2 --performance-schema=OFF --skip-log-bin
}

role_slurmdbd() {
  start_munge
  wait_for_port mariadb 3306
  exec slurmdbd -D
}

make_homes() {
  local name
  for name in alice bob carol admin; do
    [ -d "/home/$name" ] && continue
    install -d -o "$name" -g "$name" -m 0755 "/home/$name"
  done
}

role_slurmctld() {
  start_munge
  install -d -o slurm -g slurm -m 0755 /var/lib/slurm/slurmctld
  make_homes
  wait_for_port slurmdbd 6819
  rm -f /run/slurm/accounts-ready
  (/etc/slurm/accounts.sh && touch /run/slurm/accounts-ready) &
  exec slurmctld -D
}

# Sample the GPUs every second: metrics for Prometheus on port 9402, files on the shared file system. It is restarted
# when it ends, as by systemd, and is not a child of slurmd, which waits for its children. The unit also reads the
# options file.
start_exporter() {
  install -d -m 0755 /run/dcgm-job-mapping /shared/gpu-history
  # shellcheck disable=SC2016  # expanded by the inner shell
  setsid --fork bash -c 'while :; do
    EXPORTER_OPTIONS=
    [ ! -r /etc/default/slurm-affinode-exporter ] || . /etc/default/slurm-affinode-exporter
    slurm-affinode exporter --listen 0.0.0.0:9402 --period 1s --job-map /run/dcgm-job-mapping \
      --spool /shared/gpu-history --spool-keep 1d $EXPORTER_OPTIONS &
    echo $! >/run/slurm-affinode-exporter.pid
    wait
    sleep 1
  done'
}

# Derive the HMAC key of images from munge's key, so that it is the same on every node.
make_image_key() {
  local key=/etc/slurm-affinode/image.key
  install -d -m 0755 /etc/slurm-affinode
  [ -s "$key" ] && return 0
  (umask 077 && { printf 'slurm-affinode images'; cat /etc/munge/munge.key; } | sha512sum | cut -d ' ' -f 1 >"$key.new")
  chmod 0400 "$key.new"
  mv "$key.new" "$key"
}

# Suspend idle jobs. Like the exporter, the agent is restarted when it ends, and not a child of slurmd.
start_agent() {
  install -d -m 0700 /shared/slurm-affinode /shared/slurm-affinode/images
  make_image_key
  # shellcheck disable=SC2016  # expanded by the inner shell
  setsid --fork bash -c 'while :; do
    slurm-affinode agent &
    echo $! >/run/slurm-affinode-agent.pid
    wait
    sleep 0.5
  done'
}

# Device files like those of the driver, which CRIU cannot dump: character devices that all users may open (FUSE and the
# control device of loop devices), and an unused loop device, which can be mapped. Each GPU has a different device,
# because a device cgroup identifies them by number. If the kernel lacks one, the number of NVIDIA's driver is used: the
# file exists but cannot be opened (ENXIO), and the emulated driver treats it as a GPU.
make_devices() { # NUMBER
  local index stand_ins=(229 237)
  for ((index = 0; index < $1; index++)); do
    [ ! -e "/dev/nvidia$index" ] || continue
    mknod -m 0666 "/dev/nvidia$index" c 10 "${stand_ins[index]}"
    (: <>"/dev/nvidia$index") 2>/dev/null && continue
    rm "/dev/nvidia$index"
    mknod -m 0666 "/dev/nvidia$index" c 195 "$index"
  done
  [ -e /dev/nvidia-uvm ] || mknod -m 0444 /dev/nvidia-uvm b 7 7
  (: </dev/nvidia-uvm) 2>/dev/null || rm /dev/nvidia-uvm
  sed 's/^Character devices:$/&\n 10 nvidia\n  7 nvidia-uvm/' /proc/devices >/run/devices
  mount --bind /run/devices /proc/devices
}

# The part of Slurm's configuration that depends on cgroups.
configure_cgroups() {
  local chosen=/etc/slurm/cgroups/$CGROUPS
  [ -d "$chosen" ] || { say "CLUSTER_CGROUPS is v1, v2 or none, not '$CGROUPS'"; return 2; }
  cp "$chosen"/* /etc/slurm/
}

# A cgroup into which users may move their processes, like that of a user's systemd instance.
make_user_cgroup() { # DIRECTORY
  local file
  mkdir -p "$1/user.slice"
  for file in cpuset.cpus cpuset.mems; do
    [ ! -e "$1/$file" ] || [ -e "$1/cgroup.controllers" ] || cat "$1/$file" >"$1/user.slice/$file"
  done
  chmod 0666 "$1/cgroup.procs" "$1/user.slice/cgroup.procs"
}

# Set up cgroups as on a real node: the container's cgroup is the root, and slurmd may create others below it. Start
# this script again in a new cgroup namespace, because Slurm reads the paths of its processes from there.
enter_cgroups() {
  local point type options
  [ "$CGROUPS" != none ] || return 0
  [ "$(readlink /proc/self/ns/cgroup)" != "$(readlink /proc/1/ns/cgroup)" ] || exec unshare --cgroup "$0" compute
  if [ "$CGROUPS" = v2 ]; then
    umount --recursive --lazy /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup
    make_user_cgroup /sys/fs/cgroup
    # Slurm rejects hosts that have also mounted version 1.
    if grep -qv '^0::' /proc/self/cgroup; then slurmd=(env LD_PRELOAD=/usr/local/lib/cgroup-unified.so slurmd); fi
    return
  fi
  while read -r _ point type options _; do
    if [ "$type" != cgroup ] || [[ ,$options, != *,ro,* ]]; then continue; fi
    mount -o remount,bind,rw "$point" || { say "$point cannot be written: CLUSTER_CGROUPS=none runs without cgroups"; return 1; }
    make_user_cgroup "$point"
  done </proc/mounts
  [ -w /sys/fs/cgroup/devices ] || { say "no cgroup v1 on this host: try CLUSTER_CGROUPS=v2 or none"; return 1; }
}

role_compute() {
  local slurmd=(slurmd)
  enter_cgroups
  start_munge
  install -d -m 0755 /var/spool/slurmd /var/lib/slurm-affinode
  if [ "${GPUS:-0}" -gt 0 ]; then
    make_devices "$GPUS"
    # The seed is the same at every start, and different on every node.
    gpu-emulatorctl init --force --gpus "$GPUS" --model h100-80g --seed "$(hostname)" --sample-period-ms 200
    start_exporter
    start_agent
  fi
  wait_for_port slurmctld 6817 || say "slurmctld does not respond; starting slurmd anyway"
  # Unlike with the units, slurmd does not wait for the agent: a node restarts within seconds, while a lost job still
  # waits after its requeue. Otherwise the end of the lost attempt, which Slurm sends by job ID only, could hit the new
  # attempt.
  # -b: treat the start of the container as a boot, because the kernel's uptime is that of the host.
  exec "${slurmd[@]}" -D -b
}

role_login() {
  start_munge
  exec sleep infinity
}

role_prometheus() {
  install -d -o prometheus -g prometheus -m 0755 /var/lib/prometheus
  exec setpriv --reuid prometheus --regid prometheus --init-groups prometheus --config.file=/etc/slurm/prometheus.yml \
    --storage.tsdb.path=/var/lib/prometheus --storage.tsdb.retention.time=1d --web.listen-address=0.0.0.0:9090 \
    --log.level=warn
}

case "${1:-}" in
  mariadb | slurmdbd | slurmctld | compute | login | prometheus)
    prepare_run
    configure_cgroups
    "role_$1"
    ;;
  *)
    say "the role is mariadb, slurmdbd, slurmctld, compute, login or prometheus, not '${1:-}'"
    exit 2
    ;;
esac
