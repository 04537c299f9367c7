"""The checkpoint image: contents, manifest, signatures, verification."""
