"""The CUDA driver: checkpoint, restore and features, through a helper process."""
