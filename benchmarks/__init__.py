"""A package, so that none of this name of the machine is taken for it."""
