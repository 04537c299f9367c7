"""GPU samples of any origin, brought into one schema and kept as Parquet by day (``store``)."""
