#!/usr/bin/env bash
# Builds the C parts that the tree has and installs them below a directory: native.sh DESTDIR
set -euo pipefail

destdir=$1
src=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$destdir"

for part in containers/criu-shim spank; do
  [ -f "$src/$part/Makefile" ] || continue
  make -s -C "$src/$part" clean
  make -s -C "$src/$part"
  make -s -C "$src/$part" install DESTDIR="$destdir"
done
