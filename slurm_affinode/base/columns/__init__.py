"""Quick conversion of columns of text, in compiled C."""
