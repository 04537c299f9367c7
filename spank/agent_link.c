#include "agent_link.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FIRST_BACKOFF_NS 250000000
#define LONGEST_BACKOFF_NS 10000000000
#define STAYED_NS 1000000000

void link_init(struct link *link, const char *path)
{
    *link = (struct link){.path = path, .fd = -1, .backoff_ns = FIRST_BACKOFF_NS};
}

static void back_off(struct link *link, int64_t now_ns)
{
    link->retry_ns = now_ns + link->backoff_ns;
    link->backoff_ns *= 2;
    if (link->backoff_ns > LONGEST_BACKOFF_NS)
        link->backoff_ns = LONGEST_BACKOFF_NS;
}

void link_close(struct link *link, int64_t now_ns)
{
    if (link->fd >= 0) {
        close(link->fd);
        /* A connection that lasted was to a working agent, which is likely to restart soon. */
        if (now_ns - link->since_ns >= STAYED_NS)
            link->backoff_ns = FIRST_BACKOFF_NS;
    }
    link->fd = -1;
    back_off(link, now_ns);
}

static bool send_hello(int fd, const struct hello *hello)
{
    union {
        char bytes[CMSG_SPACE(3 * sizeof(int))];
        struct cmsghdr align;
    } control;
    int streams[3] = {0, 1, 2};
    char text[MESSAGE_BYTES];
    struct iovec part = {.iov_base = text, .iov_len = message_hello(hello, text)};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(streams));
    memcpy(CMSG_DATA(header), streams, sizeof(streams));
    return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)part.iov_len;
}

bool link_try(struct link *link, const struct hello *hello, int64_t now_ns)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (link->fd >= 0)
        return true;
    if (now_ns < link->retry_ns)
        return false;
    link->since_ns = now_ns;
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", link->path);
    /* An agent that accepts no connections must not block PID 1. */
    link->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (link->fd < 0 || connect(link->fd, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        !send_hello(link->fd, hello)) {
        if (errno == EAGAIN) /* the agent runs and its backlog is full: a long backoff would never get through */
            link->backoff_ns = FIRST_BACKOFF_NS;
        link_close(link, now_ns);
        return false;
    }
    return true;
}

bool link_send(struct link *link, const char *packet, size_t length, int64_t now_ns)
{
    if (link->fd >= 0 && send(link->fd, packet, length, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)length)
        return true;
    if (link->fd >= 0)
        link_close(link, now_ns);
    return false;
}

enum link_news link_read(struct link *link, struct message *message, int64_t now_ns)
{
    char packet[MESSAGE_BYTES];
    struct iovec part = {.iov_base = packet, .iov_len = sizeof(packet)};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1}; /* no room for descriptors: the kernel drops them */
    ssize_t got;

    if (link->fd < 0)
        return LINK_NOTHING;
    got = recvmsg(link->fd, &header, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return LINK_NOTHING;
    if (got > 0 && !(header.msg_flags & MSG_TRUNC) && message_parse(packet, (size_t)got, message)) {
        link->backoff_ns = FIRST_BACKOFF_NS;
        return LINK_MESSAGE;
    }
    link_close(link, now_ns);
    return LINK_LOST;
}
