/* Tells the agent which process is the shepherd of a job: one file per job, written by root, beside the agent's socket.
 *
 * The agent takes no process for a shepherd that is not announced. It works whether or not an agent runs, and before the
 * first one has started. */
#ifndef AFFINODE_ANNOUNCEMENT_H
#define AFFINODE_ANNOUNCEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#define ANNOUNCEMENTS "shepherds" /* the directory, beside the socket */

struct announcement {
    int directory; /* -1: nothing is announced */
    char name[16];
    dev_t device; /* of the file: another attempt's is left alone */
    ino_t inode;
};

/* Looks at the program that is to be announced. False: it is not a regular file that belongs to root and that root alone can
 * change and read; ERROR says why. */
bool announcement_program(const char *path, struct stat *program, char *error, size_t size);

/* Announces the unreaped child SHEPHERD of this process as shepherd of the job. False: ERROR says why. */
bool announcement_make(struct announcement *made, const char *socket, uint32_t job_id, uid_t uid, pid_t shepherd,
                       const struct stat *program, char *error, size_t size);

/* Removes it. False: it is there still. Once more does no harm. */
bool announcement_withdraw(struct announcement *made);

#endif
