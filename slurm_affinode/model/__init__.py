"""Frozen values shared by every layer. Standard library only."""
