/* The messages between shepherd and agent: one per packet, a verb followed by key=value lines.
 *
 * Pure. The input is not trusted: a packet that is not one of the messages below is rejected.
 */
#ifndef AFFINODE_MESSAGE_H
#define AFFINODE_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MESSAGE_BYTES 4096
#define MESSAGE_TEXT_BYTES 513
#define PROTOCOL_VERSION 1

enum verb {
    VERB_UNKNOWN, /* well formed; perhaps of a later version of the agent */
    VERB_START,
    VERB_RESTORED,
    VERB_WAIT,
    VERB_HOLD,
    VERB_SAY,
    VERB_SIGNAL,
};

struct message {
    enum verb verb;
    bool restore_failed;           /* start */
    bool reports;                  /* wait: the agent accepts reports of processes that have ended */
    bool fresh;                    /* wait: for free GPU memory to start with, not for a checkpoint image */
    pid_t pid;                     /* restored: PID of the root of the process tree in this namespace, > 1 */
    int number;                    /* signal */
    char text[MESSAGE_TEXT_BYTES]; /* hold: the reason; say: the line. Control characters are replaced. */
};

/* False: not a valid message. */
bool message_parse(const char *packet, size_t length, struct message *message);

struct hello {
    uint32_t job;
    uint32_t restarts;
    bool image;
    pid_t root; /* 0: not started yet */
    const char *option;
};

/* Each writes a packet to TEXT, which has MESSAGE_BYTES, and returns its length. */
size_t message_hello(const struct hello *hello, char *text);
size_t message_started(pid_t root, char *text);
size_t message_reaped(pid_t pid, int wait_status, char *text);
size_t message_exit(int wait_status, char *text);
size_t message_signalled(int number, char *text);

#endif
