"""The daemon of a node: watches jobs, suspends them, has them restored."""
