"""Health of an engine, from its samples."""
