#!/usr/bin/env bash
# Create the accounts, QOS and users of the cluster once. Runs in the container of slurmctld.
set -euo pipefail

wait_s=90
sacctmgr() { command sacctmgr --immediate --quiet "$@" >/dev/null; }

# slurmctld registers the cluster, and the TRES that are named in limits.
waited=0
until [ "$(scontrol ping 2>/dev/null | grep -c 'is UP')" -ge 1 ] \
  && command sacctmgr --noheader --parsable2 show tres type=gres 2>/dev/null | grep -q '|gpu|'; do
  [ "$waited" -lt $((wait_s * 2)) ] || { echo "accounts: no slurmctld after $wait_s s" >&2; exit 1; }
  sleep 0.5
  waited=$((waited + 1))
done

[ -z "$(command sacctmgr --noheader --parsable2 show user where name=carol)" ] || exit 0

sacctmgr add qos high Priority=100
sacctmgr add qos limited MaxTRESPerUser=gres/gpu=1 MaxSubmitJobsPerUser=20
sacctmgr add account research Description=research Organization=site
sacctmgr add account vision,language parent=research Description=groups Organization=research
sacctmgr add account teaching Description=courses Organization=site
sacctmgr modify account root set QOS=normal,high,limited DefaultQOS=normal
sacctmgr modify account teaching set QOS=normal,limited DefaultQOS=limited
sacctmgr add user alice Account=vision DefaultAccount=vision
sacctmgr add user alice Account=language
sacctmgr add user bob Account=language DefaultAccount=language
sacctmgr add user admin Account=root DefaultAccount=root AdminLevel=Admin
sacctmgr add user carol Account=teaching DefaultAccount=teaching
