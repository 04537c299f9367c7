"""GPU metrics from a Prometheus server or a compatible one."""
