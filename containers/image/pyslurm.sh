#!/usr/bin/env bash
# Build a wheel of pyslurm for the Slurm of this image: pyslurm.sh RELEASE DIRECTORY
# The newest pyslurm is for 25.11 and rejects other releases by the version in Slurm's header. With 26.05 it works
# unchanged if another header tells its setup.py 25.11, and the compiler maps the names that have changed. With 24.11
# its source would have to be edited, so no wheel is built, and the commands of Slurm are used.
set -euo pipefail

version=25.11.2
release=$1
directory=$2
mkdir -p "$directory"
[ "$release" = 26.05 ] || exit 0

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
  cython3 python3-dev python3-packaging python3-pip python3-setuptools python3-wheel >/dev/null
rm -rf /var/lib/apt/lists/*

work=$(mktemp -d)
mkdir "$work/slurm"
cat >"$work/slurm/slurm_version.h" <<'HEADER'
#ifdef __GNUC__
#include_next <slurm/slurm_version.h>
#undef SLURM_VERSION_NUMBER
#endif
#define SLURM_VERSION_NUMBER 0x190b00
HEADER
for header in /usr/include/slurm/*.h; do
  [ -e "$work/slurm/${header##*/}" ] || ln -s "$header" "$work/slurm/"
done

export SLURM_INCLUDE_DIR=$work SLURM_LIB_DIR=/usr/lib/x86_64-linux-gnu
export CFLAGS="-O1 -DNDEBUG -DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf
  -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=ESLURM_MAX_JOB_COUNT"
/build/with-ca.sh python3 -m pip wheel --quiet --no-build-isolation --no-deps --no-binary pyslurm \
  --wheel-dir "$directory" "pyslurm==$version"
