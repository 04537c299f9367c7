"""GPUs of a node: readings, the jobs that use them, and their export."""
