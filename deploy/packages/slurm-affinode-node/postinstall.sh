#!/bin/sh
# deb: configure [OLD-VERSION]; rpm: the number of installed versions. After an upgrade, services run the new version:
# the agent continues what its journal records, and its jobs are not affected.
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
case "$1 $2" in
  "configure "?* | "2 "*) systemctl try-restart slurm-affinode-agent.service slurm-affinode-exporter.service || true ;;
esac
