"""Suspension of a job: checkpoint, requeue and restore, or sleep in place, with the records of both."""
