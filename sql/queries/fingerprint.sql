-- Whether the facts of an interval have changed: counts and newest change of the runs that overlap it, and of what is
-- recorded of their GPUs, and of suspensions that had begun. (steps take no part in a report) The condition on the end
-- alone follows from the others, and is there for its index.
SELECT
  COUNT(*) AS runs,
  COALESCE(MAX("revision"), 0) AS revision,
  (SELECT COUNT(*) FROM allocation_gpus AS a WHERE (a."cluster", a."job_id") IN (
    SELECT r."cluster", r."job_id" FROM jobs AS r WHERE (r."end" IS NULL OR r."end" >= :since)
      AND r."start" < :until AND (r."end" IS NULL OR r."end" > :since OR r."start" >= :since))) AS gpus,
  (SELECT COALESCE(MAX(s."revision"), 0) FROM suspensions AS s WHERE s."began_ms" / 1000 < :until
    AND (COALESCE(s."restoring_ms", s."ended_ms") IS NULL OR COALESCE(s."restoring_ms", s."ended_ms") / 1000 >= :since))
    AS suspensions
FROM jobs
WHERE ("end" IS NULL OR "end" >= :since) AND "start" < :until AND ("end" IS NULL OR "end" > :since OR "start" >= :since)
