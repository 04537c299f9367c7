"""Node daemon that watches jobs, suspends idle ones and has them restored."""
