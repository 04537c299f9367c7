"""The command ``slurm-affinode``: one module for each command, which reads options, calls and prints."""
