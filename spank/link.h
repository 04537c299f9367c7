/* The shepherd's connection to the node's agent: made again when it breaks, never waited for. */
#ifndef AFFINODE_LINK_H
#define AFFINODE_LINK_H

#include "message.h"

struct link {
    const char *path;
    int fd;            /* -1: not connected */
    int64_t retry_ns;  /* when to try again */
    int64_t backoff_ns;
    int64_t since_ns;  /* connected: since when */
};

enum link_news {
    LINK_NOTHING,
    LINK_MESSAGE,
    LINK_LOST, /* closed by the other side, or it said something that is no message: not connected any more */
};

void link_init(struct link *link, const char *path);

/* Where none is and it is time: connects and says hello with descriptors 0, 1, 2. True: connected. */
bool link_try(struct link *link, const struct hello *hello, int64_t now_ns);

/* False: it is lost. */
bool link_send(struct link *link, const char *packet, size_t length, int64_t now_ns);

enum link_news link_read(struct link *link, struct message *message, int64_t now_ns);

void link_close(struct link *link, int64_t now_ns);

#endif
