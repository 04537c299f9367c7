#!/bin/sh
# The database's own user, which Debian's server package without its start scripts leaves out, and the people of the
# cluster. The same ids everywhere, as a site's directory service would give them; their homes are on
# the shared file system and are made when the cluster first starts.
set -eu
useradd --system --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin mysql
uid=2001
for name in alice bob carol admin; do
  groupadd --gid "$uid" "$name"
  useradd --no-create-home --uid "$uid" --gid "$uid" --shell /bin/bash "$name"
  uid=$((uid + 1))
done
