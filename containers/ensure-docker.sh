#!/usr/bin/env bash
# Make sure that a Docker daemon responds. On Debian, as root, it installs docker.io and a compose command if they are
# missing, starts the daemon, and reports it. All messages go to standard error.
#   containers/ensure-docker.sh           install and start what is missing
#   containers/ensure-docker.sh --check   only check: exit 0 if a daemon responds, 3 if not
set -euo pipefail

wait_s=60
log_file=${DOCKERD_LOG:-/var/log/dockerd.log}

say() { echo "ensure-docker: $*" >&2; }
fail() { say "$*"; exit 3; }

daemon_answers() { command -v docker >/dev/null && timeout 20 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }
has_compose() { docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null; }

case "${1:-}" in
  "") ;;
  --check) if daemon_answers && has_compose; then exit 0; else exit 3; fi ;;
  *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

install_missing() {
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io iptables)
  has_compose || missing+=(docker-compose)
  [ "${#missing[@]}" -eq 0 ] && return 0
  command -v apt-get >/dev/null || fail "not a Debian system: install Docker and docker compose, then try again"
  say "installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

start_daemon() {
  # A service manager starts the daemon; installing the package has usually started it already.
  if [ -d /run/systemd/system ]; then
    say "starting docker.service"
    systemctl start docker.service
  else
    # The descriptors that a caller (make, a CI runner, flock below) passed on are closed, or it would wait for them.
    setsid --fork dockerd >>"$log_file" 2>&1 </dev/null 9>&- &
    say "started dockerd in the background (log $log_file); stop it with: kill \"\$(cat /var/run/docker.pid)\""
  fi
  local waited=0
  until daemon_answers; do
    [ "$waited" -lt "$wait_s" ] || { tail -n 5 "$log_file" >&2 || true; fail "dockerd does not respond after $wait_s s"; }
    sleep 1
    waited=$((waited + 1))
  done
}

if daemon_answers && has_compose; then exit 0; fi
[ "$(id -u)" -eq 0 ] || fail "no Docker daemon responds, or there is no compose command: start one, or run this as root on Debian"
exec 9>/run/lock/slurm-affinode-ensure-docker
flock -w 300 9 || fail "another run of this script has not ended after 300 s"
install_missing
daemon_answers || start_daemon
