-- A job is looked up with the tasks of its array and its heterogeneous components.
CREATE INDEX IF NOT EXISTS jobs_array ON jobs ("array_job_id");
CREATE INDEX IF NOT EXISTS jobs_het ON jobs ("het_job_id");

-- After an ingest, what came again of users that were forgotten is removed from the rows of this change.
CREATE INDEX IF NOT EXISTS jobs_revision ON jobs ("revision");
CREATE INDEX IF NOT EXISTS steps_revision ON steps ("revision");
CREATE INDEX IF NOT EXISTS suspensions_revision ON suspensions ("revision");
