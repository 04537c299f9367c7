/* What the shepherd and the agent say to each other: one message per packet, a verb and then key=value lines.
 *
 * Pure. Nothing that arrives is trusted: a packet is one of the messages below or it is refused.
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
    VERB_UNKNOWN, /* well formed; an agent of a later version may know it */
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
    bool fresh;                    /* wait: for the room to start in, not for an image */
    pid_t pid;                     /* restored: of the tree's root in this namespace, > 1 */
    int number;                    /* signal */
    char text[MESSAGE_TEXT_BYTES]; /* hold: the reason; say: the line. Control characters are replaced. */
};

/* False: not a message. */
bool message_parse(const char *packet, size_t length, struct message *message);

struct hello {
    uint32_t job;
    uint32_t restarts;
    bool image;
    pid_t root; /* 0: nothing runs yet */
    const char *option;
};

/* Each gives the length of the packet in TEXT, which holds MESSAGE_BYTES. */
size_t message_hello(const struct hello *hello, char *text);
size_t message_started(pid_t root, char *text);
size_t message_exit(int wait_status, char *text);
size_t message_signalled(int number, char *text);

#endif
