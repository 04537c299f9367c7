"""Jobs off their GPUs, into images and back: the CUDA driver, CRIU, the files of a job, and the stores of images.

``interface`` has the contracts. The order of the steps is that of ``suspension.suspend`` and ``suspension.restore``.
"""
