"""Immutable values shared by all layers. Standard library only."""
