"""Slurm's accounting (``sacct``), the live queue (``interface``), and Slurm's notations."""
