"""Files, sockets and devices of a job: what becomes of them in a suspension."""
