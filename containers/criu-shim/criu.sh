#!/bin/sh
# Run criu in test containers, with the shim if the container lacks CAP_SYS_RESOURCE (bit 24) or the kernel is newer
# than this criu, plain otherwise.
capabilities=$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status)
newer=$(printf '%s\n6.16\n' "$(uname -r)" | sort --version-sort | head -n 1)
if [ $((0x${capabilities:-0} >> 24 & 1)) -eq 0 ] || [ "$newer" = 6.16 ]; then
  export LD_PRELOAD=/usr/local/lib/criu-shim.so
fi
exec /usr/sbin/criu "$@"
