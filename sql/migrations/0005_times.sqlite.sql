-- The time for which Slurm had suspended the job, in seconds; accounting's elapsed time is without it. NULL is unknown:
-- records that were ingested by earlier releases do not say it.

ALTER TABLE jobs ADD COLUMN "suspended_s" BIGINT;

-- By how much the start and the end may be later, in seconds, because both are local times in the hour that is repeated
-- when clocks are set back; 0 otherwise.

ALTER TABLE jobs ADD COLUMN "time_doubt_s" BIGINT;
