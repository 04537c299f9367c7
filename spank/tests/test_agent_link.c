/* The connection to an agent that runs, does not run, and sends invalid messages. */
#include "agent_link.h"
#include "channel.h"
#include "check.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static char path[64];
static const struct hello hello = {.job = 7, .option = "window=900"};

static int listen_here(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    unlink(path);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(fd, 4) == 0);
    return fd;
}

static int descriptors_with_hello(int agent)
{
    char text[MESSAGE_BYTES];
    char control[256];
    struct iovec part = {.iov_base = text, .iov_len = sizeof(text) - 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header;
    ssize_t got;
    int count;

    CHECK(agent >= 0);
    got = recvmsg(agent, &message, 0);
    header = CMSG_FIRSTHDR(&message);
    CHECK(got > 0);
    text[got] = '\0';
    CHECK_TEXT(text, "hello\nversion=1\njob=7\nrestarts=0\nimage=0\nroot=0\noption=window=900");
    CHECK(header != NULL && header->cmsg_type == SCM_RIGHTS);
    count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (int i = 0; i < count; i++) {
        int fd;

        memcpy(&fd, CMSG_DATA(header) + (size_t)i * sizeof(int), sizeof(fd));
        close(fd);
    }
    return count;
}

static void missing_agent_does_not_block(void)
{
    struct link link;

    link_init(&link, path);
    CHECK(!link_try(&link, &hello, 0));
    CHECK(link.fd == -1 && link.retry_ns > 0);
    for (int64_t now = link.retry_ns, tries = 0; tries < 20; tries++) {
        CHECK(!link_try(&link, &hello, now) && link.retry_ns > now && link.retry_ns - now <= 10000000000);
        now = link.retry_ns;
    }
    CHECK(!link_send(&link, "x", 1, 0));
}

static void hello_carries_three_descriptors(void)
{
    int listener = listen_here();
    struct message message;
    struct link link;
    int agent;

    link_init(&link, path);
    CHECK(link_try(&link, &hello, 0));
    agent = accept(listener, NULL, NULL);
    CHECK(descriptors_with_hello(agent) == 3);
    CHECK(link_read(&link, &message, 0) == LINK_NOTHING);
    CHECK(send(agent, "wait", 4, 0) == 4 && send(agent, "start", 5, 0) == 5);
    CHECK(link_read(&link, &message, 0) == LINK_MESSAGE && message.verb == VERB_WAIT);
    CHECK(link_read(&link, &message, 0) == LINK_MESSAGE && message.verb == VERB_START);
    close(agent);
    CHECK(link_read(&link, &message, 0) == LINK_LOST && link.fd == -1);
    close(listener);
}

/* The backoff is reset also by agents that sent no message before their restart. */
static void restarted_agent_is_found_soon(void)
{
    int listener = listen_here();
    struct message message;
    struct link link;
    int64_t now = 0;

    link_init(&link, path);
    for (int restarts = 0; restarts < 20; restarts++) {
        int agent;

        CHECK(link_try(&link, &hello, now));
        agent = accept(listener, NULL, NULL);
        CHECK(descriptors_with_hello(agent) == 3);
        close(agent);
        now += 2000000000;
        CHECK(link_read(&link, &message, now) == LINK_LOST && link.retry_ns - now == 250000000);
        now = link.retry_ns;
    }
    close(listener);
}

static void a_mad_agent_is_left(const char *packet, size_t length)
{
    int listener = listen_here();
    struct message message;
    struct link link;
    int agent;

    link_init(&link, path);
    CHECK(link_try(&link, &hello, 0));
    agent = accept(listener, NULL, NULL);
    CHECK(agent >= 0 && descriptors_with_hello(agent) == 3);
    CHECK(send(agent, packet, length, 0) == (ssize_t)length);
    CHECK(link_read(&link, &message, 5) == LINK_LOST && link.fd == -1 && link.retry_ns > 5);
    close(agent);
    close(listener);
}

static void full_backlog_does_not_block(void)
{
    int listener = listen_here();
    struct link links[64];
    int refused = 0;

    for (int i = 0; i < 64; i++) {
        link_init(&links[i], path);
        refused += !link_try(&links[i], &hello, 0);
    }
    CHECK(refused > 0);
    /* The agent runs: the backoff stays short, however often its backlog was full. */
    for (int tries = 0; tries < 8; tries++) {
        int64_t now = links[63].retry_ns;

        CHECK(!link_try(&links[63], &hello, now) && links[63].retry_ns - now <= 250000000);
    }
    for (int i = 0; i < 64; i++)
        link_close(&links[i], 0);
    close(listener);
}

static void packets_of_another_size_are_skipped(void)
{
    struct packet packet = {.kind = PACKET_GO};
    int ends[2];

    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    CHECK(channel_receive(ends[0], &packet, 0) == 0);
    CHECK(channel_receive(ends[0], &packet, 20) == 0);
    CHECK(send(ends[1], "short", 5, 0) == 5);
    CHECK(channel_send(ends[1], &packet));
    packet.kind = 0;
    CHECK(channel_receive(ends[0], &packet, 1000) == 1 && packet.kind == PACKET_GO);
    close(ends[1]);
    CHECK(channel_receive(ends[0], &packet, 1000) == -1);
    CHECK(!channel_send(ends[0], &packet));
    close(ends[0]);
}

int main(void)
{
    static char large[3 * MESSAGE_BYTES];

    snprintf(path, sizeof(path), "/tmp/affinode-link-%d.sock", (int)getpid());
    memset(large, 'a', sizeof(large));
    missing_agent_does_not_block();
    hello_carries_three_descriptors();
    restarted_agent_is_found_soon();
    a_mad_agent_is_left("\0\1\2\3", 4);
    a_mad_agent_is_left("restored", 8);
    a_mad_agent_is_left(large, sizeof(large));
    full_backlog_does_not_block();
    packets_of_another_size_are_skipped();
    unlink(path);
    return 0;
}
