"""Decisions: no I/O, no clock, no logging."""
