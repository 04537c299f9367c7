"""Demo histories, in the formats that sites have (``sacct`` text, GPU samples, engine metrics).

``recording/`` is a quarter of an hour of the cluster in containers, with emulated GPUs, and the metrics of a real
engine on a CPU; ``synthetic`` is a week of a larger cluster, generated from a fixed seed. They are labeled as such
wherever they are shown, and are ingested like real history.
"""
