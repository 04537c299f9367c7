"""The job on its node: processes, shepherd, announcement, cgroups, streams, environment."""
