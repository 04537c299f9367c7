/* cuCheckpointProcess*: requests of one process to another. Only restore needs cuInit() in the caller, and only if the GPUs
 * are not in persistence mode. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define DRIVER_CHECKPOINT 570
#define DRIVER_GPU_PAIRS 580
#define DRIVER_CUSTOM_STORAGE 615

static long driver_major(const struct emu_state *state)
{
    return strtol(state->driver_version, NULL, 10);
}

static bool is_zero(const void *data, size_t size)
{
    for (const char *at = data; size > 0; at++, size--)
        if (*at != 0)
            return false;
    return true;
}

static CUresult begin(struct emu_state **state)
{
    *state = emu_attach();
    if (*state == NULL)
        return CUDA_ERROR_NO_DEVICE;
    if (driver_major(*state) >= DRIVER_CHECKPOINT)
        return CUDA_SUCCESS;
    emu_detach();
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* A process without the thread has not initialized CUDA. */
static CUresult thread_of(pid_t pid, pid_t *tid)
{
    *tid = emu_restore_thread(pid);
    if (*tid > 0)
        return CUDA_SUCCESS;
    return emu_alive(pid) ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult send(struct emu_state *state, pid_t pid, const struct emu_order *order)
{
    pid_t tid;
    int result = CUDA_ERROR_UNKNOWN;
    CUresult rc = thread_of(pid, &tid);

    if (rc != CUDA_SUCCESS)
        return rc;
    switch (emu_post(state, pid, tid, order, &result)) {
    case EMU_POST_OK:
        return (CUresult)result;
    case EMU_POST_DENIED:
        return CUDA_ERROR_NOT_PERMITTED;
    default:
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
}

static CUresult ask(pid_t pid, const struct emu_order *order)
{
    struct emu_state *state;
    CUresult rc = begin(&state);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = send(state, pid, order);
    emu_detach();
    return rc;
}

CUDA_EXPORT(cuCheckpointProcessLock, int pid, CUcheckpointLockArgs *args)
{
    struct emu_order order = {.op = EMU_OP_LOCK};

    if (args != NULL && (args->reserved0 != 0 || !is_zero(args->reserved1, sizeof(args->reserved1))))
        return CUDA_ERROR_INVALID_VALUE;
    if (args != NULL)
        order.timeout_ms = args->timeoutMs;
    return ask(pid, &order);
}

/* For older drivers the field consists of reserved bytes, which must be zero. */
static CUresult with_storage(pid_t pid, struct emu_order *order, enum emu_op op, CUcheckpointCustomStorageInfo **out)
{
    struct emu_state *state;
    CUresult rc = begin(&state);

    if (rc != CUDA_SUCCESS)
        return rc;
    order->op = op;
    rc = driver_major(state) < DRIVER_CUSTOM_STORAGE ? CUDA_ERROR_INVALID_VALUE : storage_possible(state, pid);
    if (rc == CUDA_SUCCESS)
        rc = send(state, pid, order);
    emu_detach();
    return rc == CUDA_SUCCESS ? storage_begin(pid, out) : rc;
}

CUresult storage_complete(pid_t pid)
{
    struct emu_order order = {.op = EMU_OP_COMPLETE};

    return ask(pid, &order);
}

CUDA_EXPORT(cuCheckpointProcessCheckpoint, int pid, CUcheckpointCheckpointArgs *args)
{
    struct emu_order order = {.op = EMU_OP_CHECKPOINT};

    if (args != NULL && !is_zero(args->reserved, sizeof(args->reserved)))
        return CUDA_ERROR_INVALID_VALUE;
    if (args != NULL && args->customStorageInfo_out != NULL)
        return with_storage(pid, &order, EMU_OP_OUT, args->customStorageInfo_out);
    return ask(pid, &order);
}

CUDA_EXPORT(cuCheckpointProcessUnlock, int pid, CUcheckpointUnlockArgs *args)
{
    struct emu_order order = {.op = EMU_OP_UNLOCK};

    if (args != NULL && !is_zero(args, sizeof(*args)))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &order);
}

static CUresult fill_pairs(const CUcheckpointRestoreArgs *args, const struct emu_state *state, struct emu_order *order)
{
    if (args == NULL)
        return CUDA_SUCCESS;
    if (args->padding0 != 0 || !is_zero(args->reserved, sizeof(args->reserved)) || args->gpuPairsCount > EMU_MAX_GPUS ||
        (args->gpuPairsCount > 0) != (args->gpuPairs != NULL))
        return CUDA_ERROR_INVALID_VALUE;
    /* For older drivers the pairs are reserved bytes, which must be zero. */
    if (args->gpuPairsCount > 0 && driver_major(state) < DRIVER_GPU_PAIRS)
        return CUDA_ERROR_INVALID_VALUE;
    order->pair_count = args->gpuPairsCount;
    for (unsigned at = 0; at < order->pair_count; at++) {
        memcpy(order->pairs[at].old_uuid, args->gpuPairs[at].oldUuid.bytes, 16);
        memcpy(order->pairs[at].new_uuid, args->gpuPairs[at].newUuid.bytes, 16);
    }
    return CUDA_SUCCESS;
}

static bool persistent(const struct emu_state *state)
{
    for (unsigned gpu = 0; gpu < state->gpu_count; gpu++)
        if (!state->gpus[gpu].persistence)
            return false;
    return true;
}

CUDA_EXPORT(cuCheckpointProcessRestore, int pid, CUcheckpointRestoreArgs *args)
{
    struct emu_order order = {.op = EMU_OP_RESTORE};
    struct emu_state *state;
    CUresult rc = begin(&state);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = fill_pairs(args, state, &order);
    if (rc == CUDA_SUCCESS && !cuda.initialized && !persistent(state))
        rc = CUDA_ERROR_NOT_INITIALIZED;
    if (rc == CUDA_SUCCESS && args != NULL && args->customStorageInfo_out != NULL)
        rc = with_storage(pid, &order, EMU_OP_IN, args->customStorageInfo_out);
    else if (rc == CUDA_SUCCESS)
        rc = send(state, pid, &order);
    emu_detach();
    return rc;
}

/* A live process that does not use CUDA is "running", as with some real drivers; only its restore thread shows whether a
 * process uses CUDA. The state comes from the process itself, so the call blocks while the process is stopped. */
CUDA_EXPORT(cuCheckpointProcessGetState, int pid, CUprocessState *out)
{
    struct emu_state *state;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : begin(&state);
    int slot;

    if (rc != CUDA_SUCCESS)
        return rc;
    emu_lock(state);
    slot = emu_slot_of_pid(state, pid);
    if (slot >= 0)
        *out = (CUprocessState)state->procs[slot].cuda_state;
    emu_unlock(state);
    emu_detach();
    if (slot < 0 && !emu_alive(pid))
        return CUDA_ERROR_OPERATING_SYSTEM;
    if ((slot >= 0 || emu_restore_thread(pid) > 0) && !emu_runs(pid))
        return CUDA_ERROR_OPERATING_SYSTEM;
    /* It has the thread but no slot on this node: its contents are in its own memory. */
    if (slot < 0)
        *out = emu_restore_thread(pid) > 0 ? CU_PROCESS_STATE_CHECKPOINTED : CU_PROCESS_STATE_RUNNING;
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuCheckpointProcessGetRestoreThreadId, int pid, int *tid)
{
    struct emu_state *state;
    CUresult rc = tid == NULL ? CUDA_ERROR_INVALID_VALUE : begin(&state);

    if (rc != CUDA_SUCCESS)
        return rc;
    emu_detach();
    return thread_of(pid, tid);
}
