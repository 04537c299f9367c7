#!/usr/bin/env bash
# Create the Debian base image of one suite: from the registry if it is reachable, otherwise with debootstrap from
# Debian's packages. Does nothing if the image exists.
#   containers/base-image.sh bookworm  creates slurm-affinode/base:bookworm, for the tests of the Debian packages
#   containers/base-image.sh trixie    creates slurm-affinode/base:trixie
#   containers/base-image.sh forky     creates slurm-affinode/base:forky (Debian testing)
# BASE_IMAGE_SOURCE=registry|debootstrap uses only this source.
set -euo pipefail

suite=${1:-}
image=slurm-affinode/base:$suite
pull_timeout_s=120
scripts=/usr/share/debootstrap/scripts

say() { echo "base-image: $*" >&2; }

case "$suite" in
  bookworm | trixie | forky) ;;
  *) echo "usage: $0 bookworm|trixie|forky" >&2; exit 2 ;;
esac
case "${BASE_IMAGE_SOURCE:-}" in
  "" | registry | debootstrap) ;;
  *) echo "BASE_IMAGE_SOURCE is registry or debootstrap, not '$BASE_IMAGE_SOURCE'" >&2; exit 2 ;;
esac

from_registry() {
  timeout "$pull_timeout_s" docker pull --quiet "debian:$suite-slim" >/dev/null 2>&1 || return 1
  docker tag "debian:$suite-slim" "$image"
  say "$image is debian:$suite-slim of the registry"
}

# debootstrap needs root and chroot. The script of unstable is used for a suite that it does not know yet.
from_debootstrap() {
  if [ "$(id -u)" -ne 0 ]; then
    say "no registry can be reached, and debootstrap needs root: run this once as root, or pull debian:$suite-slim as $image"
    return 1
  fi
  if ! command -v debootstrap >/dev/null; then
    say "installing the Debian package debootstrap"
    # Another call of this script may be installing it.
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends debootstrap >/dev/null
  fi
  local root script=() log
  root=$(mktemp -d /var/tmp/slurm-affinode-base.XXXXXX)
  log=$root.log
  # shellcheck disable=SC2064  # the value of now is meant
  trap "rm -rf --one-file-system '$root' '$log'" EXIT
  if [ ! -e "$scripts/$suite" ]; then
    script=("" "$scripts/sid") # the third argument, empty: the default mirror
  fi
  say "creating $image with debootstrap"
  if ! debootstrap --variant=minbase "$suite" "$root" "${script[@]}" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    say "debootstrap failed"
    return 1
  fi
  # Services of packages must not be started during the build.
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
  chmod 0755 "$root/usr/sbin/policy-rc.d"
  tar -C "$root" --numeric-owner --exclude='./var/cache/apt/archives/*.deb' --exclude='./var/lib/apt/lists/*' \
    --exclude='./dev/*' -c . | docker import --change 'CMD ["bash"]' - "$image" >/dev/null
}

docker image inspect "$image" >/dev/null 2>&1 && exit 0
source=${BASE_IMAGE_SOURCE:-}
if [ "$source" != debootstrap ] && from_registry; then exit 0; fi
if [ "$source" = registry ]; then say "the registry does not provide debian:$suite-slim"; exit 3; fi
from_debootstrap || exit 3
