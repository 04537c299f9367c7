#!/usr/bin/env bash
# Builds the C parts that the tree has and installs them below a directory: native.sh DESTDIR
set -euo pipefail

destdir=$1
src=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$destdir"

for part in containers/gpu-emulator containers/criu-shim spank; do
  [ -f "$src/$part/Makefile" ] || continue
  make -s -C "$src/$part" clean
  make -s -C "$src/$part"
  make -s -C "$src/$part" install DESTDIR="$destdir"
done

# The emulated driver's libraries are found as the real one's would be.
if [ -d "$destdir/usr/local/lib/gpu-emulator" ]; then
  mkdir -p "$destdir/etc/ld.so.conf.d"
  echo /usr/local/lib/gpu-emulator >"$destdir/etc/ld.so.conf.d/gpu-emulator.conf"
fi
