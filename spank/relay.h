/* Delivers each signal once to each process of a job, as without a shepherd. Signals reach a job in three ways:
 *
 *   the whole container (scancel, time limit)      the kernel delivers it to the script and to the shepherd
 *   the batch script alone (--signal=B:, -b)       only the keeper gets it; with proctrack/cgroup all but SIGKILL
 *   the script's process group (scancel --full)    only the keeper and the witness get it
 *
 * So the shepherd passes on the signals that the keeper reports, unless it got the same signal itself at that time. Where
 * Slurm signals the whole container, the keeper may get it too, in unknown order: hence the delay.
 *
 * A process that gets two signals at once handles that with the lower number first, and Slurm sends SIGCONT (18) before
 * SIGTERM (15), so signals that are passed on keep a distance.
 * Pure: the caller passes the time.
 */
#ifndef AFFINODE_RELAY_H
#define AFFINODE_RELAY_H

#include <stdbool.h>
#include <stdint.h>

#define RELAY_SIGNALS 65
#define RELAY_PENDING 32
#define RELAY_NEAR_NS 100000000
#define RELAY_DELAY_NS 150000000
#define RELAY_DISTANCE_NS 10000000

struct relay {
    int64_t direct_ns[RELAY_SIGNALS]; /* when the shepherd itself got the signal; 0: not since the last match */
    struct {
        int number;
        bool group;
        int64_t at_ns;
    } pending[RELAY_PENDING];
    int count;
    int64_t passed_ns; /* when the last signal was passed on; 0: none was */
};

/* Records a signal that the shepherd got from outside the namespace. */
void relay_direct(struct relay *relay, int number, int64_t now_ns);

/* Records a signal that the keeper got. */
void relay_reported(struct relay *relay, int number, bool group, int64_t at_ns);

/* Returns whether a signal is due, with its number and whether it goes to the script's process group. */
bool relay_next(struct relay *relay, int64_t now_ns, int *number, bool *group);

/* The time of the next relay_next(); 0: no signal is pending. */
int64_t relay_due_ns(const struct relay *relay);

#endif
