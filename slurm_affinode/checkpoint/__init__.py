"""Jobs off their GPUs, into images and back: the CUDA driver, CRIU, the files of a job, and the stores of images.

``interface`` has the contracts; the order of the steps is the agent's (``agent.suspend``, ``agent.restore``).
"""
