"""Readers of Slurm's accounting (``sacct`` text and JSON) and of recorded allocations."""
