"""Fuzzers of everything that root reads from users: ``make fuzz``."""
