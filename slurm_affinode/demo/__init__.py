"""Histories to look at without a cluster of one's own, in the forms that sites have (``sacct`` text, GPU samples).

``recording/`` is a quarter of an hour of the cluster in containers, with emulated GPUs; ``synthetic`` is a week of a
larger cluster, invented by a fixed seed. Both are called what they are wherever they are shown, and go through the same
ingest as real history.
"""
