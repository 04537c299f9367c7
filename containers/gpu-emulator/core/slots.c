#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static int own_slot = -1;

static void forget_in_child(void)
{
    own_slot = -1;
}

__attribute__((constructor)) static void watch_fork(void)
{
    pthread_atfork(NULL, NULL, forget_in_child);
}

/* Without stdio: it also runs in the restore thread while another thread may be frozen inside malloc(). */
static void read_comm(char *out, size_t size)
{
    int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, out, size - 1);

    if (fd >= 0)
        close(fd);
    out[length < 0 ? 0 : length] = '\0';
    out[strcspn(out, "\n")] = '\0';
}

/* The slot's lock is acquired before the slot is marked as used, and released after it is marked as free: a used slot
 * without a lock belongs to a dead process. */
int emu_slot_open(struct emu_state *state)
{
    if (own_slot >= 0)
        return own_slot;
    if (emu_locks_get() < 0)
        return -1;
    emu_sweep(state);
    for (int slot = 0; slot < EMU_MAX_PROCS; slot++) {
        struct emu_proc *proc = &state->procs[slot];

        if (proc->used || !emu_locks_take(slot))
            continue;
        *proc = (struct emu_proc){.ns_pid = getpid(), .serial = ++state->next_serial};
        read_comm(proc->comm, sizeof(proc->comm));
        proc->used = 1;
        own_slot = slot;
        return slot;
    }
    emu_locks_put();
    errno = EUSERS;
    return -1;
}

static void free_slot(struct emu_state *state, int slot)
{
    struct emu_proc *proc = &state->procs[slot];
    uint64_t now_ns = emu_now_ns();

    for (unsigned gpu = 0; gpu < state->gpu_count; gpu++)
        emu_cancel(&state->gpus[gpu], proc->serial, now_ns);
    proc->used = 0;
}

void emu_slot_close(struct emu_state *state)
{
    if (own_slot < 0)
        return;
    free_slot(state, own_slot);
    emu_locks_drop(own_slot);
    own_slot = -1;
    emu_locks_put();
}

int emu_slot_own(void)
{
    return own_slot;
}

pid_t emu_slot_pid(struct emu_state *state, int slot)
{
    pid_t holder;

    if (slot < 0 || slot >= EMU_MAX_PROCS || !state->procs[slot].used)
        return -1;
    if (slot == own_slot)
        return getpid();
    if (emu_locks_get() < 0)
        return 0;
    holder = emu_locks_holder(slot);
    emu_locks_put();
    return holder;
}

int emu_slot_of_pid(struct emu_state *state, pid_t pid)
{
    for (int slot = 0; slot < EMU_MAX_PROCS; slot++)
        if (state->procs[slot].used && emu_slot_pid(state, slot) == pid)
            return slot;
    return -1;
}

/* Frees the resources of dead processes. */
void emu_sweep(struct emu_state *state)
{
    if (emu_locks_get() < 0)
        return;
    for (int slot = 0; slot < EMU_MAX_PROCS; slot++)
        if (state->procs[slot].used && slot != own_slot && emu_locks_holder(slot) == -1)
            free_slot(state, slot);
    emu_locks_put();
}

uint64_t emu_proc_bytes(const struct emu_state *state, const struct emu_proc *proc, unsigned gpu)
{
    uint64_t blocks = (proc->gpu[gpu].bytes + EMU_BLOCK - 1) / EMU_BLOCK * EMU_BLOCK;

    return blocks + proc->gpu[gpu].contexts * state->context_bytes;
}

uint64_t emu_used_bytes(const struct emu_state *state, unsigned gpu)
{
    uint64_t sum = 0;

    for (int slot = 0; slot < EMU_MAX_PROCS; slot++)
        if (state->procs[slot].used)
            sum += emu_proc_bytes(state, &state->procs[slot], gpu);
    return sum;
}

uint64_t emu_free_bytes(const struct emu_state *state, unsigned gpu)
{
    uint64_t room = state->gpus[gpu].total_bytes - state->gpus[gpu].reserved_bytes;
    uint64_t used = emu_used_bytes(state, gpu);

    return used < room ? room - used : 0;
}
