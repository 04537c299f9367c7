"""Metrics of inference engines: names by engine and release, scrapes, and samples."""
