"""GPU metrics: readers, the common sample schema, and the sample store."""
