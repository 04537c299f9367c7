#include "relay.h"

#include <string.h>

static bool near(int64_t one, int64_t other)
{
    return one - other <= RELAY_NEAR_NS && other - one <= RELAY_NEAR_NS;
}

void relay_direct(struct relay *relay, int number, int64_t now_ns)
{
    if (number > 0 && number < RELAY_SIGNALS)
        relay->direct_ns[number] = now_ns;
}

void relay_reported(struct relay *relay, int number, bool group, int64_t at_ns)
{
    if (number <= 0 || number >= RELAY_SIGNALS || relay->count == RELAY_PENDING)
        return;
    relay->pending[relay->count].number = number;
    relay->pending[relay->count].group = group;
    relay->pending[relay->count].at_ns = at_ns;
    relay->count++;
}

static void drop_first(struct relay *relay)
{
    relay->count--;
    memmove(relay->pending, relay->pending + 1, (size_t)relay->count * sizeof(relay->pending[0]));
}

bool relay_next(struct relay *relay, int64_t now_ns, int *number, bool *group)
{
    while (relay->count > 0) {
        int64_t *direct = &relay->direct_ns[relay->pending[0].number];

        if (*direct != 0 && near(*direct, relay->pending[0].at_ns)) {
            *direct = 0;
            drop_first(relay);
            continue;
        }
        if (now_ns < relay_due_ns(relay))
            return false;
        relay->passed_ns = now_ns;
        *number = relay->pending[0].number;
        *group = relay->pending[0].group;
        drop_first(relay);
        return true;
    }
    return false;
}

int64_t relay_due_ns(const struct relay *relay)
{
    int64_t due_ns = relay->pending[0].at_ns + RELAY_DELAY_NS;
    int64_t apart_ns = relay->passed_ns + RELAY_DISTANCE_NS;

    if (relay->count == 0)
        return 0;
    return relay->passed_ns != 0 && apart_ns > due_ns ? apart_ns : due_ns;
}
