"""Output of results: HTML pages, charts, mails, JSON and CSV. Computes only layout."""
