/* The shepherd's connection to the agent of the node: reconnects with backoff, and never blocks. */
#ifndef AFFINODE_AGENT_LINK_H
#define AFFINODE_AGENT_LINK_H

#include "message.h"

struct link {
    const char *path;
    int fd;            /* -1: not connected */
    int64_t retry_ns;  /* the next attempt to connect */
    int64_t backoff_ns;
    int64_t since_ns;  /* the last attempt to connect */
};

enum link_news {
    LINK_NOTHING,
    LINK_MESSAGE,
    LINK_LOST, /* the agent closed the connection, or sent an invalid message: disconnected */
};

void link_init(struct link *link, const char *path);

/* Connects if the next attempt is due, and sends hello with the descriptors 0, 1 and 2. True: connected. */
bool link_try(struct link *link, const struct hello *hello, int64_t now_ns);

/* False: disconnected. */
bool link_send(struct link *link, const char *packet, size_t length, int64_t now_ns);

enum link_news link_read(struct link *link, struct message *message, int64_t now_ns);

void link_close(struct link *link, int64_t now_ns);

#endif
