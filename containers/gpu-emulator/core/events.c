#include "core.h"

void emu_event_post(struct emu_state *state, unsigned gpu, uint64_t type, uint64_t data)
{
    struct emu_event *event = &state->events[state->event_count % EMU_EVENTS];

    *event = (struct emu_event){.number = state->event_count, .type = type, .data = data, .gpu = gpu};
    state->event_count++;
    __atomic_add_fetch(&state->event_futex, 1, __ATOMIC_RELEASE);
    emu_futex_wake(&state->event_futex);
}
