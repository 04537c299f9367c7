#!/bin/sh
# deb: remove, upgrade VERSION; rpm: 0 if no version remains.
set -e
[ -d /run/systemd/system ] || exit 0
case "$1" in
  remove | 0) systemctl disable --now slurm-affinode-nightly.timer slurm-affinode-zombies.timer || true ;;
esac
