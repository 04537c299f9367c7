"""Records of suspensions: journal, ledger, and the state that all nodes share."""
