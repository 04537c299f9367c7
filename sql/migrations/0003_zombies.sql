-- What was looked at, told and done about squatters, zombies and orphans. Times are UTC, milliseconds since 1970
-- ("submit": seconds). The audit is only ever added to.

CREATE TABLE IF NOT EXISTS zombie_audit (
  "id" BIGINT NOT NULL,
  "at_ms" BIGINT NOT NULL,
  "run" VARCHAR(64) NOT NULL,
  "actor" TEXT /*M!(4294967295)*/ NOT NULL,
  "verb" VARCHAR(32) NOT NULL,
  "result" VARCHAR(32) NOT NULL,
  "cluster" TEXT /*M!(4294967295)*/,
  "kind" VARCHAR(64),
  "finding" VARCHAR(512),
  "job_id" BIGINT,
  "job" TEXT /*M!(4294967295)*/,
  "user" TEXT /*M!(4294967295)*/,
  "node" TEXT /*M!(4294967295)*/,
  "rule" TEXT /*M!(4294967295)*/,
  "reason" TEXT /*M!(4294967295)*/ NOT NULL,
  "evidence" TEXT /*M!(4294967295)*/,
  PRIMARY KEY ("id")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

CREATE INDEX IF NOT EXISTS zombie_audit_at ON zombie_audit ("at_ms");
CREATE INDEX IF NOT EXISTS zombie_audit_job ON zombie_audit ("job_id");

-- Warnings that were sent. "number" 0: a matter without stages.
CREATE TABLE IF NOT EXISTS zombie_warnings (
  "finding" VARCHAR(512) NOT NULL,
  "number" BIGINT NOT NULL,
  "at_ms" BIGINT NOT NULL,
  "recipient" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("finding", "number")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- Who does what now, so that two runs at the same time do not do it twice.
CREATE TABLE IF NOT EXISTS zombie_claims (
  "claim" VARCHAR(640) NOT NULL,
  "run" VARCHAR(64) NOT NULL,
  "until_ms" BIGINT NOT NULL,
  PRIMARY KEY ("claim")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;

-- Owners who asked that a job be left alone for a time: once for each run of a job.
CREATE TABLE IF NOT EXISTS zombie_keeps (
  "cluster" VARCHAR(128) NOT NULL,
  "job_id" BIGINT NOT NULL,
  "submit" BIGINT NOT NULL,
  "user" TEXT /*M!(4294967295)*/ NOT NULL,
  "why" TEXT /*M!(4294967295)*/ NOT NULL,
  "at_ms" BIGINT NOT NULL,
  "until_ms" BIGINT NOT NULL,
  PRIMARY KEY ("cluster", "job_id", "submit")
) /*M! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin */;
