"""Prediction of run time, memory and GPU memory of a submission from what is known when it is submitted."""
