"""The sample store: GPU samples in Parquet files, partitioned by UTC day."""
