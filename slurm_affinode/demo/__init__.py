"""A synthetic week of a small GPU cluster, so that the product can be seen without one.

Everything here is invented, by a fixed seed, and called synthetic wherever it is shown. It is written in the forms
that sites have (``sacct`` text, DCGM-named columns in Parquet) and goes through the same ingest as real history.
"""
