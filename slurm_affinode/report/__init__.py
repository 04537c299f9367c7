"""Results as people and machines read them: pages, charts, mails, JSON and CSV. Computes nothing but layout."""
