-- How much the store holds: what "db status" shows.
SELECT
  (SELECT COUNT(*) FROM jobs) AS jobs,
  (SELECT COUNT(*) FROM jobs WHERE "gpus" > 0) AS gpu_jobs,
  (SELECT COUNT(*) FROM jobs WHERE "end" IS NULL AND "start" IS NOT NULL) AS running_jobs,
  (SELECT COUNT(*) FROM steps) AS steps,
  (SELECT COUNT(*) FROM allocation_gpus) AS allocation_gpus,
  (SELECT COUNT(*) FROM ingests) AS ingests,
  (SELECT COUNT(*) FROM reports) AS reports,
  (SELECT MIN("start") FROM jobs) AS first_start,
  (SELECT MAX("start") FROM jobs) AS last_start,
  (SELECT MAX("end") FROM jobs) AS last_end
