"""Demo histories, in the formats that sites have (``sacct`` text, GPU samples).

``recording/`` is a quarter of an hour of the cluster in containers, with emulated GPUs; ``synthetic`` is a week of a
larger cluster, generated from a fixed seed. Both are labeled as such wherever they are shown, and are ingested like
real history.
"""
