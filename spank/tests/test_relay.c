/* A signal to the whole container is delivered only by the kernel; a signal to Slurm's task is passed on. */
#include "check.h"
#include "relay.h"

#include <signal.h>

#define MS 1000000LL

static struct relay relay;
static int number;
static bool group;

static void begin(void)
{
    memset(&relay, 0, sizeof(relay));
    number = 0;
}

static void signal_to_the_script(void)
{
    begin();
    relay_reported(&relay, SIGUSR1, false, 1000 * MS);
    CHECK(relay_due_ns(&relay) == 1150 * MS);
    CHECK(!relay_next(&relay, 1100 * MS, &number, &group));
    CHECK(relay_next(&relay, 1150 * MS, &number, &group) && number == SIGUSR1 && !group);
    CHECK(relay_due_ns(&relay) == 0 && !relay_next(&relay, 9000 * MS, &number, &group));
}

static void signal_to_the_group(void)
{
    begin();
    relay_reported(&relay, SIGTERM, true, 1000 * MS);
    CHECK(relay_next(&relay, 2000 * MS, &number, &group) && number == SIGTERM && group);
}

static void signal_to_the_container_in_either_order(void)
{
    begin();
    relay_direct(&relay, SIGTERM, 990 * MS);
    relay_reported(&relay, SIGTERM, true, 1000 * MS);
    CHECK(!relay_next(&relay, 2000 * MS, &number, &group) && relay_due_ns(&relay) == 0);
    relay_reported(&relay, SIGTERM, true, 3000 * MS);
    CHECK(!relay_next(&relay, 3060 * MS, &number, &group));
    relay_direct(&relay, SIGTERM, 3070 * MS);
    CHECK(!relay_next(&relay, 4000 * MS, &number, &group) && relay_due_ns(&relay) == 0);
}

static void direct_signal_matches_one_report(void)
{
    begin();
    relay_direct(&relay, SIGUSR1, 1000 * MS);
    relay_reported(&relay, SIGUSR1, true, 1000 * MS);
    relay_reported(&relay, SIGUSR1, false, 1060 * MS);
    CHECK(relay_next(&relay, 2000 * MS, &number, &group) && !group);
    CHECK(relay_due_ns(&relay) == 0);
}

static void old_direct_signal_matches_nothing(void)
{
    begin();
    relay_direct(&relay, SIGUSR1, 1000 * MS);
    relay_reported(&relay, SIGUSR1, false, 1200 * MS);
    CHECK(relay_next(&relay, 2000 * MS, &number, &group) && number == SIGUSR1);
}

static void order_is_kept_and_invalid_numbers_dropped(void)
{
    begin();
    relay_reported(&relay, SIGCONT, false, 1000 * MS);
    relay_reported(&relay, SIGTERM, false, 1001 * MS);
    relay_reported(&relay, 0, false, 1001 * MS);
    relay_reported(&relay, 65, false, 1001 * MS);
    relay_reported(&relay, -3, false, 1001 * MS);
    relay_direct(&relay, 4000, 1001 * MS);
    CHECK(relay_next(&relay, 2000 * MS, &number, &group) && number == SIGCONT);
    CHECK(!relay_next(&relay, 2000 * MS, &number, &group) && relay_due_ns(&relay) == 2010 * MS);
    CHECK(relay_next(&relay, 2010 * MS, &number, &group) && number == SIGTERM);
    CHECK(!relay_next(&relay, 2020 * MS, &number, &group) && relay_due_ns(&relay) == 0);
    for (int i = 0; i < 3 * RELAY_PENDING; i++)
        relay_reported(&relay, SIGUSR2, false, 1000 * MS);
    CHECK(relay.count == RELAY_PENDING);
}

int main(void)
{
    signal_to_the_script();
    signal_to_the_group();
    signal_to_the_container_in_either_order();
    direct_signal_matches_one_report();
    old_direct_signal_matches_nothing();
    order_is_kept_and_invalid_numbers_dropped();
    return 0;
}
