-- The priority of the job as accounting has recorded it last; 0 is a held job. NULL is unknown: records that were
-- ingested by earlier releases do not say it.

ALTER TABLE jobs ADD COLUMN "priority" BIGINT;
