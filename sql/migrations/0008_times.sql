-- Retention reads the steps, GPUs and journal entries that are old, and no others.
CREATE INDEX IF NOT EXISTS steps_end ON steps ("end");
CREATE INDEX IF NOT EXISTS allocation_gpus_start ON allocation_gpus ("start");
CREATE INDEX IF NOT EXISTS ingests_finished ON ingests ("finished");

-- A night ingests thousands of files of samples; few entries are of accounting, or have bad records.
CREATE INDEX IF NOT EXISTS ingests_kind ON ingests ("kind", "finished");
CREATE INDEX IF NOT EXISTS ingests_bad ON ingests ("bad");

-- An interval of the past has the runs that start in it, or before it by no more than the longest run takes.
CREATE INDEX IF NOT EXISTS jobs_start ON jobs ("start");
INSERT INTO meta ("name", "value")
  SELECT 'accounting.longest_s', CAST(longest AS CHAR(20)) FROM (SELECT MAX("end" - "start") AS longest FROM jobs) AS ended
  WHERE longest IS NOT NULL AND NOT EXISTS (SELECT 1 FROM meta WHERE "name" = 'accounting.longest_s');
