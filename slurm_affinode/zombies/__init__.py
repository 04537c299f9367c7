"""Squatters, zombies and orphans: find and explain them, warn owners, clean up."""
