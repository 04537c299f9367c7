#!/bin/sh
# Create the user of the database, which is missing without the start scripts of Debian's package, and the users of the
# cluster. IDs are the same in all containers, as with a directory service. Homes are on
# the shared file system and are created at the first start of the cluster.
set -eu
useradd --system --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin mysql
uid=2001
for name in alice bob carol admin; do
  groupadd --gid "$uid" "$name"
  useradd --no-create-home --uid "$uid" --gid "$uid" --shell /bin/bash "$name"
  uid=$((uid + 1))
done
