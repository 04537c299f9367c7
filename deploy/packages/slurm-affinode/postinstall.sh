#!/bin/sh
set -e
systemd-sysusers slurm-affinode.conf
if command -v systemd-tmpfiles >/dev/null; then systemd-tmpfiles --create slurm-affinode.conf; fi
[ ! -d /run/systemd/system ] || systemctl daemon-reload
