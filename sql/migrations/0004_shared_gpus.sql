-- Whether a job that slept in place had shares of GPUs (1), so that its GPU memory was free for other jobs, or whole
-- GPUs (0). NULL is unknown: the ledgers of earlier agents do not say it.

ALTER TABLE suspensions ADD COLUMN IF NOT EXISTS "shares_gpus" BIGINT;
