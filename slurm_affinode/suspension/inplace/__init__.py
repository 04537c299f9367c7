"""``mode=inplace``: GPU memory moves to host memory, and frozen processes keep the allocation until a wake request."""
