"""Configuration, processes, files, times and errors, used by all other packages."""
