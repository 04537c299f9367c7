"""``mode=inplace``: GPU memory to host memory, the processes frozen, the allocation kept; woken when somebody asks."""
