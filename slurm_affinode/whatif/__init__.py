"""Simulation of a queue of jobs: what would have waited less under another policy, or with more or freed units."""
