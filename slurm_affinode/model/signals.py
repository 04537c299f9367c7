"""Names of the signals that say whether a job is at work."""

GPU_SIGNALS = ("utilization", "memory", "engine", "sm", "tensor", "dram", "processes")
"""Activity of a GPU, each in percent. ``utilization`` and ``memory``: share of the driver's last sampling period in
which a kernel ran, or memory was used; ``engine``, ``sm``, ``tensor``, ``dram``: shares since the last sample, of GPUs
that count them; ``processes``: the busiest process since the last sample."""

HOST_SIGNALS = ("cpu", "disk", "io")
"""Activity of a job's processes on the host. ``cpu``: percent of one core; ``disk``: bytes per second from and to
storage; ``io``: bytes per second through reads and writes of any kind, so files, pipes and sockets."""
