"""Model servers: metrics of their engines, diagnoses, crashes and tuning."""
