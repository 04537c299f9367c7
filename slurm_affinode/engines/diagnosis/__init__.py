"""What the samples of an engine say about its health."""
