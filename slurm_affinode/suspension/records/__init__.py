"""What a suspension writes down: journal, ledger, and the state that all nodes share."""
