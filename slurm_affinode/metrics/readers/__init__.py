"""Readers of GPU metrics in files, one module per format."""
