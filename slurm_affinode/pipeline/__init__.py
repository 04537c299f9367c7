"""Workflows that combine databases, analysis and pages: ingest, reports, the nightly run, ``doctor``."""
