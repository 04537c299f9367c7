#!/usr/bin/env bash
# Build the C parts of the checkout and install them below a directory: native.sh DESTDIR
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

# The loader finds the libraries of the emulated driver like those of the real one.
if [ -d "$destdir/usr/local/lib/gpu-emulator" ]; then
  mkdir -p "$destdir/etc/ld.so.conf.d"
  echo /usr/local/lib/gpu-emulator >"$destdir/etc/ld.so.conf.d/gpu-emulator.conf"
fi
