"""A package, so that no installed module named ``gpu`` is imported instead."""
