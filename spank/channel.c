#include "channel.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#define MAX_UNEXPECTED 16 /* packets of another size to skip in one call, so that a flood of them cannot block it */

int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

bool channel_send(int fd, const struct packet *packet)
{
    ssize_t sent;

    do
        sent = send(fd, packet, sizeof(*packet), MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof(*packet);
}

int channel_receive(int fd, struct packet *packet, int timeout_ms)
{
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    int64_t deadline = now_ns() + (int64_t)timeout_ms * 1000000;

    for (int unexpected = 0; unexpected < MAX_UNEXPECTED;) {
        ssize_t got;
        int ready = poll(&polled, 1, timeout_ms);

        if (ready < 0 && errno == EINTR) {
            if (timeout_ms > 0) {
                int64_t left = (deadline - now_ns()) / 1000000;

                timeout_ms = left > 0 ? (int)left : 0;
            }
            continue;
        }
        if (ready <= 0)
            return ready;
        got = recv(fd, packet, sizeof(*packet), MSG_DONTWAIT | MSG_TRUNC); /* the real length, also of a longer packet */
        if (got == (ssize_t)sizeof(*packet))
            return 1;
        if (got < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (got <= 0)
            return -1;
        /* A task prolog inherits the shepherd's end, and runs as the user: ignore packets of another size. */
        unexpected++;
    }
    return 0;
}
