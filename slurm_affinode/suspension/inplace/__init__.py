"""``mode=inplace``: GPU memory moves to host memory, and frozen processes keep the allocation until a wake request.

A job is suspended by ``suspend`` and woken by ``wake``, both with ``freezer``. ``scheduler`` has the thread in between:
``sleeper_checks`` notice requests on ``sockets`` and due wakes, ``wake_requests`` come while a job is being suspended,
and ``queue`` picks the next job, with ``core.inplace`` and the memory of ``gpu_sharing``.
"""
