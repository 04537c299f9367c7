#include "core.h"

#include <unistd.h>

bool emu_fault_hit(struct emu_state *state, enum emu_fault_kind kind, struct emu_fault *out)
{
    struct emu_fault *fault = &state->faults[kind];

    if (fault->remaining == 0 || (fault->pid != 0 && fault->pid != getpid()))
        return false;
    *out = *fault;
    if (fault->remaining != UINT32_MAX)
        fault->remaining--;
    return true;
}
