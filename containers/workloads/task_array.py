#!/opt/slurm-affinode/bin/python
"""Run one task of a job array: compute for as many seconds as its number, then stay idle for as many.

sbatch --array=1-4 --partition=gpu --gres=gpu:1 --wrap /usr/local/share/workloads/task_array.py
"""

import os
import sys
import time

import gpu


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--unit", type=float, default=1, metavar="S", help="seconds for each unit of the task's number")
    options = parser.parse_args()
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not task.isdigit():
        parser.error("SLURM_ARRAY_TASK_ID is not set: start this with sbatch --array")
    seconds = int(task) * options.unit
    device, buffer = gpu.start(options)
    gpu.log("busy", task=task, seconds=seconds)
    device.compute(seconds)
    gpu.log("idle", task=task, seconds=seconds)
    time.sleep(seconds)
    return gpu.finish(device, buffer)


if __name__ == "__main__":
    sys.exit(main())
