/* Announces the shepherd of a job to the agent: one file per job, written by root, beside the agent's socket.
 *
 * The agent trusts only announced processes. No agent has to run, or have run, when a shepherd is announced. */
#ifndef AFFINODE_ANNOUNCEMENT_H
#define AFFINODE_ANNOUNCEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#define ANNOUNCEMENTS "shepherds" /* the directory, beside the socket */
#define ANNOUNCEMENT_VERSION 2   /* of the file; an agent reads its own version alone */

struct announcement {
    int directory; /* -1: nothing is announced */
    char name[16];
    dev_t device; /* of the file: identifies this attempt's announcement */
    ino_t inode;
};

/* Checks the program to be announced: a regular file of root that only root can write and read. False: ERROR has the
 * reason. */
bool announcement_program(const char *path, struct stat *program, char *error, size_t size);

/* The owner of a job, as Slurm has launched it: the agent acts for the job with exactly these rights. */
struct announcement_owner {
    uid_t uid;
    gid_t gid;
    const gid_t *groups;
    int group_count;
};

/* Announces SHEPHERD, a child of this process that is not reaped yet. False: ERROR has the reason. */
bool announcement_make(struct announcement *made, const char *socket, uint32_t job_id, const struct announcement_owner *owner,
                       pid_t shepherd, const struct stat *program, char *error, size_t size);

/* Removes the announcement. False: it still exists. Idempotent. */
bool announcement_withdraw(struct announcement *made);

#endif
