"""The join of GPU samples with allocations."""
