"""What the GPUs did, and for whom: samples joined with allocations, and what follows. It reads, and never acts."""
