"""Keyed pseudonyms of names, in anonymous reports and in exported traces."""

from __future__ import annotations

import hashlib
import hmac
import json


def pseudonym(key: bytes, kind: str, *names: str) -> str:
    """Return the pseudonym of a name: 48 bits of HMAC-SHA256, which depend on the key and the kind."""
    message = json.dumps([kind, *names]).encode("utf-8", "surrogatepass")
    return f"{kind}{hmac.new(key, message, hashlib.sha256).hexdigest()[:12]}"
