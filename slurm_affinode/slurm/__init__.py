"""Slurm as it is read: accounting (``sacct``), the live queue (``interface``), and Slurm's own notations."""
