"""Why a model server ended: its log, Slurm's record and the last samples."""
