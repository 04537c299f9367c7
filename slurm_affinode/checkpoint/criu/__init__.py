"""CRIU: dumps and restores of a process tree, and what it does not carry."""
