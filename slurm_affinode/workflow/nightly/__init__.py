"""The unattended run: take in what is new, render what is due, keep the list of reports, delete what is old."""
