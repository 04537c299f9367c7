BEGIN TRANSACTION;
CREATE TABLE allocation_gpus (
  "cluster" VARCHAR(128) NOT NULL,
  "job_id" BIGINT NOT NULL,
  "start" BIGINT NOT NULL,
  "node" VARCHAR(255) NOT NULL,
  "gpu" VARCHAR(128) NOT NULL,
  "revision" BIGINT NOT NULL,
  PRIMARY KEY ("cluster", "job_id", "start", "node", "gpu")
);
CREATE TABLE ingest_problems (
  "ingest_id" BIGINT NOT NULL,
  "number" BIGINT NOT NULL,
  "line" BIGINT,
  "reason" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("ingest_id", "number")
);
CREATE TABLE ingests (
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
);
INSERT INTO "ingests" VALUES(1,'sacct','sacct.txt','bd49b15ba79ad1827d82009d2835f2c5cdd6f8d3a9cf4d51855481e4b6cb7064',1796046195,1796046198,1795235564,1795235781,7,7,0,0,0,'[]');
INSERT INTO "ingests" VALUES(2,'suspensions','ledger/c1.jsonl','9890b62493deda67b53c29bd747e2b90518d82ffa03f8db4230bb8a2f8303204',1796046209,1796046209,NULL,NULL,2,1,0,1,0,'[]');
INSERT INTO "ingests" VALUES(3,'suspensions','ledger/c2.jsonl','15e98f732242c171a6baa64f2560a3cfc11b79e73d384b2c1e763c7c1f0b5e61',1796046209,1796046209,NULL,NULL,1,0,1,0,0,'[]');
CREATE TABLE jobs (
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
);
INSERT INTO "jobs" VALUES('affinode',30,1795235564,NULL,NULL,NULL,NULL,NULL,'scavenger','alice',2001,'vision','gpu-preempt','normal','PREEMPTED',NULL,0,0,'None',1795235564,1795235564,1795235586,22,1800,0,1,'c2',1,524288000,524288000,'billing=1,cpu=1,gres/gpu=1,mem=500M,node=1','billing=1,cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=500M,node=1',1,1,'h100',0.153,31682560,NULL,NULL,NULL,NULL,'/home/alice','sbatch --parsable --partition=gpu-preempt --account=vision --job-name=scavenger --nodelist=c2 --gres=gpu:1 --output=/dev/null --wrap exec /usr/local/share/workloads/busy.py --seconds 150 --memory-mib 20000',1);
INSERT INTO "jobs" VALUES('affinode',31,1795235584,NULL,NULL,NULL,NULL,NULL,'keep-warm','bob',2002,'language','gpu','normal','TIMEOUT',NULL,0,0,'None',1795235584,1795235584,1795235781,197,180,0,1,'c2',1,524288000,524288000,'billing=1,cpu=1,gres/gpu=1,mem=500M,node=1','billing=1,cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=500M,node=1',1,1,'h100',0.144,31412224,NULL,NULL,NULL,NULL,'/home/bob','sbatch --parsable --partition=gpu --account=language --job-name=keep-warm --gres=gpu:1 --time=3 --output=/dev/null --wrap exec /usr/local/share/workloads/squatter.py --seconds 3600 --memory-mib 60000',1);
INSERT INTO "jobs" VALUES('affinode',32,1795235584,NULL,NULL,NULL,NULL,NULL,'resnet-sweep','alice',2001,'vision','gpu','normal','COMPLETED',NULL,0,0,'None',1795235584,1795235585,1795235705,120,1800,0,1,'c1',1,524288000,524288000,'billing=1,cpu=1,gres/gpu=1,mem=500M,node=1','billing=1,cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=500M,node=1',1,1,'h100',0.212,NULL,NULL,NULL,NULL,NULL,'/home/alice','sbatch --parsable --partition=gpu --account=vision --job-name=resnet-sweep --gres=gpu:1 --output=/dev/null --wrap exec /usr/local/share/workloads/busy.py --seconds 120 --memory-mib 24000',1);
CREATE TABLE meta (
  "name" VARCHAR(128) NOT NULL,
  "value" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("name")
);
INSERT INTO "meta" VALUES('revision','3');
INSERT INTO "meta" VALUES('accounting.gpu_clusters','["affinode"]');
INSERT INTO "meta" VALUES('ingests','3');
CREATE TABLE reports (
  "period" VARCHAR(16) NOT NULL,
  "label" VARCHAR(32) NOT NULL,
  "since" BIGINT NOT NULL,
  "until" BIGINT NOT NULL,
  "path" TEXT /*M!(4294967295)*/ NOT NULL,
  "rendered" BIGINT NOT NULL,
  "fingerprint" TEXT /*M!(4294967295)*/ NOT NULL,
  "summary" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("period", "label")
);
CREATE TABLE schema_migrations (
	version INTEGER NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	checksum VARCHAR(64) NOT NULL, 
	applied BIGINT NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "schema_migrations" VALUES(1,'0001_initial','29d8c2db299a07ee87063fa563c0891edffe4a0009026501fa0ef393edd4dac8',1796046195);
INSERT INTO "schema_migrations" VALUES(2,'0002_suspensions','9972f37277fae1e3080a3b199a3b238596101f6d932f43f926030dee65d584a7',1796046195);
INSERT INTO "schema_migrations" VALUES(3,'0003_zombies','4b0b617d5089754eba4f169950241ddcd46104c5890b9d4fc68c892923e1751e',1796046195);
CREATE TABLE steps (
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
);
INSERT INTO "steps" VALUES('affinode',30,1795235564,'batch','batch','FAILED',NULL,15,0,1795235564,1795235586,22,1,'c2',1,1,'cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=500M,node=1',1,0.152,31682560,NULL,NULL,NULL,NULL,1);
INSERT INTO "steps" VALUES('affinode',30,1795235564,'extern','extern','COMPLETED',NULL,0,0,1795235564,1795235586,22,1,'c2',1,1,'billing=1,cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=500M,node=1',1,0.001,1949696,NULL,NULL,NULL,NULL,1);
INSERT INTO "steps" VALUES('affinode',31,1795235584,'batch','batch','FAILED',NULL,15,0,1795235584,1795235781,197,1,'c2',1,1,'cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=500M,node=1',1,0.143,31412224,NULL,NULL,NULL,NULL,1);
INSERT INTO "steps" VALUES('affinode',31,1795235584,'extern','extern','COMPLETED',NULL,0,0,1795235584,1795235781,197,1,'c2',1,1,'billing=1,cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=500M,node=1',1,0.001,1798144,NULL,NULL,NULL,NULL,1);
CREATE TABLE suspensions (
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
);
INSERT INTO "suspensions" VALUES('alpha',7,1795168800,1795168860010,1,'alice',65534,'vision','gpu','c1','requeue','idle 15m',900,1,'H100',1048576,4,1795168860050,1795168860060,1795168860090,1795168860120,1795168860140,NULL,1795168860160,1795168860230,'c2',NULL,NULL,NULL,3);
CREATE TABLE zombie_audit (
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
);
CREATE TABLE zombie_claims (
  "claim" VARCHAR(640) NOT NULL,
  "run" VARCHAR(64) NOT NULL,
  "until_ms" BIGINT NOT NULL,
  PRIMARY KEY ("claim")
);
CREATE TABLE zombie_keeps (
  "cluster" VARCHAR(128) NOT NULL,
  "job_id" BIGINT NOT NULL,
  "submit" BIGINT NOT NULL,
  "user" TEXT /*M!(4294967295)*/ NOT NULL,
  "why" TEXT /*M!(4294967295)*/ NOT NULL,
  "at_ms" BIGINT NOT NULL,
  "until_ms" BIGINT NOT NULL,
  PRIMARY KEY ("cluster", "job_id", "submit")
);
CREATE TABLE zombie_warnings (
  "finding" VARCHAR(512) NOT NULL,
  "number" BIGINT NOT NULL,
  "at_ms" BIGINT NOT NULL,
  "recipient" TEXT /*M!(4294967295)*/ NOT NULL,
  PRIMARY KEY ("finding", "number")
);
CREATE INDEX jobs_end ON jobs ("end");
CREATE INDEX suspensions_began ON suspensions ("began_ms");
CREATE INDEX zombie_audit_at ON zombie_audit ("at_ms");
CREATE INDEX zombie_audit_job ON zombie_audit ("job_id");
COMMIT;
