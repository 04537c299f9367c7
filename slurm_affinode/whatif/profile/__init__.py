"""Free units over time, and the reservations of waiting jobs in it, in C."""
