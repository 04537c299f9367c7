"""slurm-affinode: measure, clean up and reclaim the idle GPUs of a Slurm cluster."""

__version__ = "0.9.0"
