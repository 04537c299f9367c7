/* Packets between the keeper (Slurm's task, root) and the shepherd (PID 1 of the job's namespace), on one machine and
 * from one build; and the one exchange between slurmstepd and the keeper. */
#ifndef AFFINODE_CHANNEL_H
#define AFFINODE_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

/* The version of the packets and of the shepherd's command line. The plugin starts only a shepherd of the same version. */
#define CHANNEL_VERSION "2"

enum packet_kind {
    PACKET_READY = 1, /* shepherd-to-be -> keeper: number: 0, or errno if the namespace could not be set up */
    PACKET_PLACE,     /* slurmstepd -> keeper: the task has its cgroups and CPUs */
    PACKET_PLACED,    /* keeper -> slurmstepd: number: 0: so has the shepherd; 1: the task continues without one */
    PACKET_GO,        /* keeper -> shepherd-to-be: exec */
    PACKET_SIGNAL,    /* keeper -> shepherd: number, group, at_ns */
    PACKET_STATUS,    /* shepherd -> keeper: number: wait status of the script */
    PACKET_EXEC,      /* script-to-be -> keeper: number: errno of its execve() */
    PACKET_HOLD,      /* shepherd -> keeper: requeue and hold the job */
    PACKET_HELD,      /* keeper -> shepherd: number 0: done */
    PACKET_RESIGN,    /* shepherd -> keeper: it cannot fork, and becomes the script */
    PACKET_RESIGNED,  /* keeper -> shepherd: the announcement is withdrawn */
};

struct packet {
    uint32_t kind;
    int32_t number;
    int32_t group;  /* the signal was sent to the task's process group, not to the task alone */
    int32_t unused; /* no padding */
    int64_t at_ns;  /* CLOCK_MONOTONIC */
};

bool channel_send(int fd, const struct packet *packet);

/* Waits at most TIMEOUT_MS (-1: no limit). Returns 1: a packet; 0: timeout; -1: the connection is closed, or an error. */
int channel_receive(int fd, struct packet *packet, int timeout_ms);

int64_t now_ns(void);

#endif
