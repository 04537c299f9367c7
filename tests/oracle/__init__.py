"""An independent computation of the figures of a report, compared with those of the product on random clusters."""
