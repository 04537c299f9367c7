"""Public traces: readers, figures, the claims of their papers, and pages."""
