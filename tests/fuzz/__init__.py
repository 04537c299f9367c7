"""Fuzzers of all data that root reads from users: ``make fuzz``."""
