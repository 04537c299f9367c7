"""Analysis of GPU utilization per job: GPU samples joined with allocations. Read-only."""
