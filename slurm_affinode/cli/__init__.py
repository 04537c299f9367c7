"""The command line of ``slurm-affinode``: one module per command or group, which parses options and prints results."""
