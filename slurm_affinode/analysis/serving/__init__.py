"""Model servers: fleets of serving pods, diagnoses of engines, and request traces."""
