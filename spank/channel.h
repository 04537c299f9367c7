/* Packets between the keeper (Slurm's task, root) and the shepherd (PID 1 of the job's namespace), on one machine and
 * from one build; and the one exchange between slurmstepd and the keeper. */
#ifndef AFFINODE_CHANNEL_H
#define AFFINODE_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

/* Of the packets and of the shepherd's command line. The plugin does not start a shepherd that speaks another one. */
#define CHANNEL_VERSION "2"

enum packet_kind {
    PACKET_READY = 1, /* shepherd-to-be -> keeper: the namespace is made; number: errno where it is not */
    PACKET_PLACE,     /* slurmstepd -> keeper: the task has its cgroups and CPUs */
    PACKET_PLACED,    /* keeper -> slurmstepd: so has the shepherd; number 1: it is gone, the task goes on by itself */
    PACKET_GO,        /* keeper -> shepherd-to-be: exec */
    PACKET_SIGNAL,    /* keeper -> shepherd: number, group, at_ns */
    PACKET_STATUS,    /* shepherd -> keeper: number: wait status of the script */
    PACKET_EXEC,      /* script-to-be -> keeper: number: errno of its execve() */
    PACKET_HOLD,      /* shepherd -> keeper: put the job back into the queue, held */
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

/* Waits at most TIMEOUT_MS (-1: for ever; 0: does not wait). 1: a packet; 0: none in time; -1: the other side is gone. */
int channel_receive(int fd, struct packet *packet, int timeout_ms);

int64_t now_ns(void);

#endif
