#!/usr/bin/env bash
# Create the Python environment of the real programs that tests run as jobs, for the release on which all tests run:
# programs.sh RELEASE DIRECTORY
set -euo pipefail
mkdir -p "$2"
[ "$1" = 24.11 ] || exit 0
python3 -m venv --system-site-packages "$2"
/build/with-ca.sh "$2/bin/pip" install -q --disable-pip-version-check --no-deps -r /build/programs.txt
# Ray takes 240 MB, 90 MB of which are Java, web pages, a library of algorithms and symbols.
ray=$("$2/bin/python" -c 'import importlib.util; print(*importlib.util.find_spec("ray").submodule_search_locations)')
rm -r "$ray"/{jars,dashboard/client,rllib}
strip "$ray"/_raylet.so "$ray"/core/src/ray/{raylet/raylet,gcs/gcs_server}
