-- The facts of slurm-affinode: runs of jobs, their steps, which GPU a run had, and what was taken in.
--
-- One file for SQLite, PostgreSQL and MariaDB. /*M! ... */ is read by MariaDB alone and is a comment to the others:
-- texts of any length, four-byte UTF-8, and keys that tell case and trailing blanks apart.
-- Times are UTC, seconds since 1970. NULL is unknown; 0 is a measurement. A statement ends with ";" at a line's end.

CREATE TABLE IF NOT EXISTS jobs (
  "cluster" VARCHAR(128) NOT NULL,
  "job_id" BIGINT NOT NULL,
  "submit" BIGINT NOT NULL,
  "array_job_id" BIGINT,
  "array_task_id" BIGINT,
  "array_spec" TEXT /*M!(4294967295)*/,
  "het_job_id" BIGINT,
  "het_offset" BIGINT,
  "job_name" TEXT /*M!(4294967295)*/,
  "user" TEXT /*M!(4294967295)*/,
  "uid" BIGINT,
  "account" TEXT /*M!(4294967295)*/,
  "partition" TEXT /*M!(4294967295)*/,
  "qos" TEXT /*M!(4294967295)*/,
  "state" TEXT /*M!(4294967295)*/,
  "cancelled_by" TEXT /*M!(4294967295)*/,
  "exit_code" BIGINT,
  "exit_signal" BIGINT,
  "reason" TEXT /*M!(4294967295)*/,
  "eligible" BIGINT,
  "start" BIGINT,
  "end" BIGINT,
  "elapsed_s" BIGINT,
  "timelimit_s" BIGINT,
  "timelimit_unlimited" SMALLINT,
  "nodes" BIGINT,
  "node_list" TEXT /*M!(4294967295)*/,
  "cpus" BIGINT,
  "req_mem_bytes" BIGINT,
  "alloc_mem_bytes" BIGINT,
  "req_tres" TEXT /*M!(4294967295)*/,
  "alloc_tres" TEXT /*M!(4294967295)*/,
  "gpus" BIGINT,
  "req_gpus" BIGINT,
  "gpu_type" TEXT /*M!(4294967295)*/,
  "total_cpu_s" DOUBLE PRECISION,
  "max_rss_bytes" BIGINT,
  "energy_j" DOUBLE PRECISION,
  "comment" TEXT /*M!(4294967295)*/,
  "admin_comment" TEXT /*M!(4294967295)*/,
  "constraints" TEXT /*M!(4294967295)*/,
  "work_dir" TEXT /*M!(4294967295)*/,
  "submit_line" TEXT /*M!(4294967295)*/,
  "revision" BIGINT NOT NULL,
  PRIMARY KEY ("cluster", "job_id", "submit")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- Reports ask for runs that end after a time (or have not ended) and start before another.
CREATE INDEX IF NOT EXISTS jobs_end ON jobs ("end");

CREATE TABLE IF NOT EXISTS steps (
  "cluster" VARCHAR(128) NOT NULL,
  "job_id" BIGINT NOT NULL,
  "submit" BIGINT NOT NULL,
  "step_id" VARCHAR(64) NOT NULL,
  "step_name" TEXT /*M!(4294967295)*/,
  "state" TEXT /*M!(4294967295)*/,
  "cancelled_by" TEXT /*M!(4294967295)*/,
  "exit_code" BIGINT,
  "exit_signal" BIGINT,
  "start" BIGINT,
  "end" BIGINT,
  "elapsed_s" BIGINT,
  "nodes" BIGINT,
  "node_list" TEXT /*M!(4294967295)*/,
  "tasks" BIGINT,
  "cpus" BIGINT,
  "alloc_tres" TEXT /*M!(4294967295)*/,
  "gpus" BIGINT,
  "total_cpu_s" DOUBLE PRECISION,
  "max_rss_bytes" BIGINT,
  "gpu_util_max_pct" DOUBLE PRECISION,
  "gpu_mem_max_bytes" BIGINT,
  "energy_j" DOUBLE PRECISION,
  "submit_line" TEXT /*M!(4294967295)*/,
  "revision" BIGINT NOT NULL,
  PRIMARY KEY ("cluster", "job_id", "submit", "step_id")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- "start" is -1 where the source did not know which run it was, "node" is '' where it did not know the node:
-- columns of a key cannot be NULL.
CREATE TABLE IF NOT EXISTS allocation_gpus (
  "cluster" VARCHAR(128) NOT NULL,
  "job_id" BIGINT NOT NULL,
  "start" BIGINT NOT NULL,
  "node" VARCHAR(255) NOT NULL,
  "gpu" VARCHAR(128) NOT NULL,
  "revision" BIGINT NOT NULL,
  PRIMARY KEY ("cluster", "job_id", "start", "node", "gpu")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- What was taken in: one row per file, stream or call of sacct.
CREATE TABLE IF NOT EXISTS ingests (
  "id" BIGINT NOT NULL,
  "kind" VARCHAR(32) NOT NULL,
  "source" TEXT /*M!(4294967295)*/ NOT NULL,
  "fingerprint" TEXT /*M!(4294967295)*/,
  "started" BIGINT NOT NULL,
  "finished" BIGINT NOT NULL,
  "first" BIGINT,
  "last" BIGINT,
  "records" BIGINT NOT NULL,
  "new" BIGINT NOT NULL,
  "updated" BIGINT NOT NULL,
  "unchanged" BIGINT NOT NULL,
  "bad" BIGINT NOT NULL,
  "notes" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("id")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- The first problems of an ingest; "bad" above counts them all.
CREATE TABLE IF NOT EXISTS ingest_problems (
  "ingest_id" BIGINT NOT NULL,
  "number" BIGINT NOT NULL,
  "line" BIGINT,
  "reason" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("ingest_id", "number")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- Reports that "nightly" has rendered. "fingerprint" names the data that they show.
CREATE TABLE IF NOT EXISTS reports (
  "period" VARCHAR(16) NOT NULL,
  "label" VARCHAR(32) NOT NULL,
  "since" BIGINT NOT NULL,
  "until" BIGINT NOT NULL,
  "path" TEXT /*M!(4294967295)*/ NOT NULL,
  "rendered" BIGINT NOT NULL,
  "fingerprint" TEXT /*M!(4294967295)*/ NOT NULL,
  "summary" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("period", "label")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- Single values: the revision of the facts, the time up to which sacct was read.
CREATE TABLE IF NOT EXISTS meta (
  "name" VARCHAR(128) NOT NULL,
  "value" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("name")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;
