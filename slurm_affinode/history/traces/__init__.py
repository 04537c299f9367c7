"""Public traces of GPU clusters, read as the history that they are."""
