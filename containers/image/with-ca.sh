#!/bin/sh
# Run a command that downloads packages of Python or Node.js, with the CA bundle of the host if there is one.
set -eu
if [ -s /build/ca.crt ]; then
  export SSL_CERT_FILE=/build/ca.crt PIP_CERT=/build/ca.crt REQUESTS_CA_BUNDLE=/build/ca.crt \
    NODE_EXTRA_CA_CERTS=/build/ca.crt
fi
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
exec "$@"
