/* The restore thread: it checkpoints and restores the GPU state of its process.
 *
 * Other threads may be frozen anywhere, so nothing here uses malloc() or stdio.
 */
#include "internal.h"

#include <semaphore.h>
#include <signal.h>
#include <string.h>

#define STACK_BYTES (256UL * 1024UL)

/* As with driver 580: after a restore has run out of GPU memory, no later one succeeds. */
static bool stuck;

/* Another process has copied the device memory (custom storage): this process does not have its contents. */
static bool outside;

static bool fault(struct emu_state *state, enum emu_fault_kind kind, struct emu_fault *out)
{
    bool hit;

    emu_lock(state);
    hit = emu_fault_hit(state, kind, out);
    emu_unlock(state);
    return hit;
}

static bool uses_managed_memory(void)
{
    for (size_t at = 0; at < cuda.allocation_count; at++)
        if (cuda.allocations[at].managed)
            return true;
    return false;
}

static CUresult restore_contents(void)
{
    CUresult rc = CUDA_SUCCESS;

    for (size_t at = 0; at < cuda.allocation_count && rc == CUDA_SUCCESS; at++)
        if (cuda.allocations[at].staged != NULL)
            rc = vram_unstage(&cuda.allocations[at]);
    return rc;
}

static CUresult stage_all(void)
{
    CUresult rc = CUDA_SUCCESS;

    for (size_t at = 0; at < cuda.allocation_count && rc == CUDA_SUCCESS; at++)
        rc = vram_stage(&cuda.allocations[at]);
    if (rc != CUDA_SUCCESS)
        restore_contents();
    return rc;
}

static void release_gpus(void)
{
    vram_close();
    release_devices();
    emu_lock(cuda.state);
    emu_slot_close(cuda.state);
    emu_unlock(cuda.state);
    emu_detach();
    cuda.state = NULL;
}

static CUresult process_checkpoint(void)
{
    struct emu_fault hit;
    CUresult rc;

    if (!gate_is(CU_PROCESS_STATE_LOCKED))
        return CUDA_ERROR_ILLEGAL_STATE;
    if (uses_managed_memory())
        return CUDA_ERROR_NOT_SUPPORTED;
    if (fault(cuda.state, EMU_FAULT_CHECKPOINT, &hit)) {
        if (hit.fatal)
            gate_set(CU_PROCESS_STATE_FAILED);
        return (CUresult)hit.error;
    }
    rc = stage_all();
    if (rc != CUDA_SUCCESS)
        return rc;
    release_gpus();
    gate_set(CU_PROCESS_STATE_CHECKPOINTED);
    return CUDA_SUCCESS;
}

/* The memory stays in place until the requester has copied it. */
static CUresult process_out(void)
{
    struct emu_fault hit;

    if (!gate_is(CU_PROCESS_STATE_LOCKED))
        return CUDA_ERROR_ILLEGAL_STATE;
    if (uses_managed_memory())
        return CUDA_ERROR_NOT_SUPPORTED;
    if (fault(cuda.state, EMU_FAULT_CHECKPOINT, &hit))
        return (CUresult)hit.error;
    if (vram_open() < 0 || vram_table_open() < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    gate_set(CU_PROCESS_STATE_CHECKPOINTING);
    return CUDA_SUCCESS;
}

static CUresult process_complete(void)
{
    if (gate_is(CU_PROCESS_STATE_CHECKPOINTING)) {
        vram_table_close();
        release_gpus();
        outside = true;
        gate_set(CU_PROCESS_STATE_CHECKPOINTED);
        return CUDA_SUCCESS;
    }
    if (!gate_is(CU_PROCESS_STATE_RESTORING))
        return CUDA_ERROR_ILLEGAL_STATE;
    vram_table_close();
    outside = false;
    hold_devices();
    streams_settle(emu_now_ns());
    gate_set(CU_PROCESS_STATE_LOCKED);
    return CUDA_SUCCESS;
}

static bool is_visible(const struct emu_state *state, unsigned minor)
{
    unsigned minors[EMU_MAX_GPUS], count = emu_visible(state, minors);

    for (unsigned at = 0; at < count; at++)
        if (minors[at] == minor)
            return !state->gpus[minor].lost;
    return false;
}

static bool same_chip(const struct emu_state *state, const struct gpu *gpu, unsigned minor)
{
    return gpu->contexts == 0 || strcmp(state->gpus[minor].chip, gpu->chip) == 0;
}

/* Without pairs, each GPU is replaced by the one with the same index, regardless of UUIDs. */
static CUresult map_by_index(const struct emu_state *state, unsigned minors[EMU_MAX_GPUS])
{
    for (unsigned at = 0; at < cuda.gpu_count; at++) {
        minors[at] = cuda.gpus[at].minor;
        if (!is_visible(state, minors[at]) || !same_chip(state, &cuda.gpus[at], minors[at]))
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* Pairs must name every GPU that was visible to the process, used or not. */
static CUresult map_by_pairs(const struct emu_state *state, const struct emu_order *order, unsigned minors[EMU_MAX_GPUS])
{
    bool taken[EMU_MAX_GPUS] = {false};

    for (unsigned at = 0; at < cuda.gpu_count; at++) {
        int minor = -1;

        for (unsigned pair = 0; pair < order->pair_count; pair++)
            if (memcmp(order->pairs[pair].old_uuid, cuda.gpus[at].uuid, 16) == 0)
                minor = emu_find_uuid(state, order->pairs[pair].new_uuid);
        if (minor < 0 || taken[minor] || !is_visible(state, (unsigned)minor) ||
            !same_chip(state, &cuda.gpus[at], (unsigned)minor))
            return CUDA_ERROR_INVALID_VALUE;
        taken[minor] = true;
        minors[at] = (unsigned)minor;
    }
    return CUDA_SUCCESS;
}

/* With the state's mutex held. */
static CUresult assign_gpus(struct emu_state *state, const unsigned minors[EMU_MAX_GPUS])
{
    struct emu_proc *proc;

    emu_sweep(state);
    for (unsigned at = 0; at < cuda.gpu_count; at++) {
        struct emu_proc need = {0};

        need.gpu[minors[at]] = (struct emu_proc_gpu){.bytes = cuda.gpus[at].bytes, .contexts = cuda.gpus[at].contexts};
        if (emu_proc_bytes(state, &need, minors[at]) > emu_free_bytes(state, minors[at])) {
            stuck = true;
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (emu_slot_open(state) < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    proc = &state->procs[emu_slot_own()];
    for (unsigned at = 0; at < cuda.gpu_count; at++) {
        struct gpu *gpu = &cuda.gpus[at];

        gpu->minor = minors[at];
        memcpy(gpu->uuid, state->gpus[gpu->minor].uuid, sizeof(gpu->uuid));
        proc->gpu[gpu->minor] = (struct emu_proc_gpu){.bytes = gpu->bytes, .contexts = gpu->contexts};
    }
    for (CUcontext at = cuda.contexts; at != NULL; at = at->next)
        at->poison_epoch = state->gpus[gpu_of((CUdevice)at->ordinal)->minor].poison_epoch;
    return CUDA_SUCCESS;
}

/* Registers with the driver again, without a GPU, so that others see the process as failed. */
static void mark_failed(struct emu_state *state)
{
    cuda.state = state;
    emu_lock(state);
    emu_slot_open(state);
    emu_unlock(state);
    gate_set(CU_PROCESS_STATE_FAILED);
}

static CUresult restore_on(struct emu_state *state, const struct emu_order *order, bool *failed)
{
    unsigned minors[EMU_MAX_GPUS];
    struct emu_fault hit;
    CUresult rc = order->pair_count > 0 ? map_by_pairs(state, order, minors) : map_by_index(state, minors);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (fault(state, EMU_FAULT_RESTORE, &hit)) {
        *failed = hit.fatal != 0;
        return (CUresult)hit.error;
    }
    emu_lock(state);
    rc = assign_gpus(state, minors);
    emu_unlock(state);
    if (rc != CUDA_SUCCESS)
        return rc;
    cuda.state = state;
    if (vram_open() < 0 || (order->op == EMU_OP_IN ? vram_table_open() < 0 : restore_contents() != CUDA_SUCCESS)) {
        *failed = true;
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (order->op == EMU_OP_IN) {
        gate_set(CU_PROCESS_STATE_RESTORING);
        return CUDA_SUCCESS;
    }
    hold_devices();
    streams_settle(emu_now_ns());
    gate_set(CU_PROCESS_STATE_LOCKED);
    return CUDA_SUCCESS;
}

static CUresult process_restore(const struct emu_order *order)
{
    struct emu_state *state;
    bool failed = false;
    CUresult rc;

    if (!gate_is(CU_PROCESS_STATE_CHECKPOINTED))
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stuck)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (outside != (order->op == EMU_OP_IN)) /* it can be restored only from where it was stored */
        return CUDA_ERROR_INVALID_VALUE;
    state = emu_attach();
    if (state == NULL)
        return CUDA_ERROR_NO_DEVICE;
    rc = restore_on(state, order, &failed);
    if (failed)
        mark_failed(state);
    else if (rc != CUDA_SUCCESS)
        emu_detach();
    return rc;
}

static CUresult execute(const struct emu_order *order)
{
    switch (order->op) {
    case EMU_OP_LOCK:
        return gate_lock(order->timeout_ms);
    case EMU_OP_CHECKPOINT:
        return process_checkpoint();
    case EMU_OP_RESTORE:
    case EMU_OP_IN:
        return process_restore(order);
    case EMU_OP_OUT:
        return process_out();
    case EMU_OP_COMPLETE:
        return process_complete();
    case EMU_OP_UNLOCK:
        return gate_unlock();
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static void serve_request(uint64_t ticket)
{
    struct emu_state *state = emu_attach();
    struct emu_request *request;
    struct emu_order order;

    if (state == NULL)
        return;
    request = emu_take(state, ticket, &order);
    if (request != NULL)
        emu_done(state, request, ticket, (int)execute(&order));
    emu_detach();
}

/* Posted by the thread when it has set its name. */
static sem_t named;

static void *serve(void *unused)
{
    siginfo_t info;
    sigset_t ours;

    sigemptyset(&ours);
    sigaddset(&ours, emu_restore_signal());
    pthread_setname_np(pthread_self(), EMU_RESTORE_THREAD);
    sem_post(&named);
    for (;;)
        if (sigwaitinfo(&ours, &info) > 0 && info.si_code == SI_QUEUE)
            serve_request((uint64_t)(uintptr_t)info.si_value.sival_ptr);
    return unused;
}

/*
 * Signals are blocked before the thread starts, and it then sets the name by which it is found. This returns after that, so
 * that a process that has initialized CUDA can be locked immediately.
 */
CUresult restore_thread_start(void)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_t thread;
    int rc;

    sem_init(&named, 0, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    rc = pthread_create(&thread, &attributes, serve, NULL);
    pthread_attr_destroy(&attributes);
    if (rc == 0)
        while (sem_wait(&named) != 0)
            ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
