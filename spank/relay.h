/* Signals reach a job in three ways, and each process is to get one once, as it would without a shepherd:
 *
 *   the whole container (scancel, time limit)      the kernel gives it to the script and to the shepherd
 *   the batch script alone (--signal=B:, -b)       only the keeper gets it
 *   the script's process group (scancel --full)    only the keeper and the witness get it
 *
 * So what the keeper tells is passed on, unless the shepherd got the same signal itself at that moment. Where processes are
 * tracked by cgroup the keeper gets what the container gets, too; and the order in which they get it is not known, so there
 * is a delay. Pure: the caller has the clock.
 */
#ifndef AFFINODE_RELAY_H
#define AFFINODE_RELAY_H

#include <stdbool.h>
#include <stdint.h>

#define RELAY_SIGNALS 65
#define RELAY_PENDING 32
#define RELAY_NEAR_NS 100000000
#define RELAY_DELAY_NS 150000000

struct relay {
    int64_t direct_ns[RELAY_SIGNALS]; /* when the shepherd itself got it; 0: not since it was last matched */
    struct {
        int number;
        bool group;
        int64_t at_ns;
    } pending[RELAY_PENDING];
    int count;
};

/* The shepherd got a signal from outside the namespace. */
void relay_direct(struct relay *relay, int number, int64_t now_ns);

/* The keeper got one. */
void relay_told(struct relay *relay, int number, bool group, int64_t at_ns);

/* The next one to be passed on: true, with its number and whether it is for the script's process group. */
bool relay_next(struct relay *relay, int64_t now_ns, int *number, bool *group);

/* When relay_next() is to be asked again, 0: not before something happens. */
int64_t relay_due_ns(const struct relay *relay);

#endif
