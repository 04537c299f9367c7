-- Suspensions of jobs: what the agents' ledgers say. Times are UTC, milliseconds since 1970 ("submit": seconds, of the
-- first submission: a requeue gives a job a new submit time in accounting). NULL is unknown or not come to yet.

CREATE TABLE IF NOT EXISTS suspensions (
  "cluster" VARCHAR(128) NOT NULL,
  "job_id" BIGINT NOT NULL,
  "submit" BIGINT NOT NULL,
  "began_ms" BIGINT NOT NULL,
  "seq" BIGINT,
  "user" TEXT /*M!(4294967295)*/,
  "uid" BIGINT,
  "account" TEXT /*M!(4294967295)*/,
  "partition" TEXT /*M!(4294967295)*/,
  "node" TEXT /*M!(4294967295)*/,
  "mode" TEXT /*M!(4294967295)*/,
  "why" TEXT /*M!(4294967295)*/,
  "window_s" BIGINT,
  "gpus" BIGINT,
  "gpu_model" TEXT /*M!(4294967295)*/,
  "gpu_bytes" BIGINT,
  "image_bytes" BIGINT,
  "locked_ms" BIGINT,
  "parked_ms" BIGINT,
  "dumped_ms" BIGINT,
  "queued_ms" BIGINT,
  "copied_ms" BIGINT,
  "released_ms" BIGINT,
  "restoring_ms" BIGINT,
  "restored_ms" BIGINT,
  "restored_node" TEXT /*M!(4294967295)*/,
  "ended_ms" BIGINT,
  "failure" TEXT /*M!(4294967295)*/,
  "restore_failure" TEXT /*M!(4294967295)*/,
  "revision" BIGINT NOT NULL,
  PRIMARY KEY ("cluster", "job_id", "submit", "began_ms")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

CREATE INDEX IF NOT EXISTS suspensions_began ON suspensions ("began_ms");
