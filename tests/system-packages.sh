#!/usr/bin/env bash
# Installs the Debian packages that a target needs and that are missing.
#   tests/system-packages.sh python   to create a virtual environment
#   tests/system-packages.sh tests    the same, and the servers and the browser for the tests
# Without root it prints the missing packages; the tests are then skipped with that reason.
set -euo pipefail

python=(python3 python3-venv ca-certificates)
tests=("${python[@]}" chromium gcc libc6-dev make mariadb-server postgresql prometheus shellcheck systemd)

case "${1:-}" in
  python) wanted=("${python[@]}") ;;
  tests) wanted=("${tests[@]}") ;;
  *) echo "usage: $0 python|tests" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "not a Debian system: make sure that these are installed: ${wanted[*]}" >&2
  exit 0
fi
missing=()
for package in "${wanted[@]}"; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
[ "${#missing[@]}" -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "missing Debian packages: ${missing[*]} (install them as root: apt-get install ${missing[*]})" >&2
  exit 0
fi
echo "installing Debian packages: ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
