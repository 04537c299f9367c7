#!/usr/bin/env bash
# Install Debian's PyTorch (CPU, about 190 MB to download) in the image of the release on which all tests run: pytorch.sh RELEASE
set -euo pipefail
[ "$1" = 24.11 ] || exit 0

# Documentation, translations and tests of packages would be a fifth of the installed size.
cat >/etc/dpkg/dpkg.cfg.d/slim <<'TEXT'
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/lib/libtorch-test/*
path-exclude=/usr/lib/python3/dist-packages/torch/bin/*est*
TEXT
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends python3-torch openmpi-bin python3-mpi4py >/dev/null
rm -rf /var/lib/apt/lists/* /etc/dpkg/dpkg.cfg.d/slim

# Debian builds PyTorch without libuv, which its store for ranks, and with it torchrun, needs unless told otherwise.
cat >>/usr/lib/python3/dist-packages/torch/distributed/__init__.py <<'TEXT'

if is_available():
    _init = TCPStore.__init__
    TCPStore.__init__ = lambda self, *args, **named: _init(self, *args, **{**named, "use_libuv": False})
TEXT
