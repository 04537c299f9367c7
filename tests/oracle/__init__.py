"""An independent computation of a report's figures, compared with the product's on random clusters."""
