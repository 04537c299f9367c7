/* CUDA calls wait here while the process is locked. It uses plain process memory and private futexes, which CRIU can dump.
 */
#include "internal.h"

#include <errno.h>
#include <time.h>

#define FAULT_POLL_NS 50000000ULL

static pthread_mutex_t gate_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_moved = PTHREAD_COND_INITIALIZER;
static CUprocessState gate_now = CU_PROCESS_STATE_RUNNING;
static bool gate_closing; /* a lock begins: new calls wait, those in progress complete */
static unsigned gate_inside;

CUresult enter(void)
{
    CUresult rc = CUDA_SUCCESS;

    if (!cuda.initialized || cuda.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&gate_mutex);
    while (gate_closing || (gate_now != CU_PROCESS_STATE_RUNNING && gate_now != CU_PROCESS_STATE_FAILED))
        pthread_cond_wait(&gate_moved, &gate_mutex);
    if (gate_now == CU_PROCESS_STATE_FAILED)
        rc = CUDA_ERROR_UNKNOWN;
    else
        gate_inside++;
    pthread_mutex_unlock(&gate_mutex);
    return rc;
}

void leave(void)
{
    pthread_mutex_lock(&gate_mutex);
    gate_inside--;
    pthread_cond_broadcast(&gate_moved);
    pthread_mutex_unlock(&gate_mutex);
}

/* The state that others see, if the process has a slot. */
static void publish(CUprocessState state)
{
    int slot = emu_slot_own();

    if (cuda.state == NULL || slot < 0)
        return;
    emu_lock(cuda.state);
    cuda.state->procs[slot].cuda_state = state;
    emu_unlock(cuda.state);
}

CUprocessState gate_state(void)
{
    CUprocessState state;

    pthread_mutex_lock(&gate_mutex);
    state = gate_now;
    pthread_mutex_unlock(&gate_mutex);
    return state;
}

bool gate_is(CUprocessState state)
{
    return gate_state() == state;
}

void gate_set(CUprocessState state)
{
    publish(state);
    pthread_mutex_lock(&gate_mutex);
    gate_now = state;
    gate_closing = false;
    pthread_cond_broadcast(&gate_moved);
    pthread_mutex_unlock(&gate_mutex);
}

static bool lock_fault(struct emu_fault *fault)
{
    bool hit;

    emu_lock(cuda.state);
    hit = emu_fault_hit(cuda.state, EMU_FAULT_LOCK_TIMEOUT, fault);
    emu_unlock(cuda.state);
    return hit;
}

/* As if a kernel never ended: waits until the deadline, or until the fault is off. */
static bool wait_for_fault_end(uint64_t deadline_ns)
{
    struct emu_fault fault;

    while (lock_fault(&fault)) {
        if (deadline_ns != 0) {
            emu_sleep_until(deadline_ns);
            return false;
        }
        emu_sleep_until(emu_now_ns() + FAULT_POLL_NS);
    }
    return true;
}

static bool wait_for_calls(uint64_t deadline_ns)
{
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / 1000000000ULL), .tv_nsec = (long)(deadline_ns % 1000000000ULL)};
    int rc = 0;

    pthread_mutex_lock(&gate_mutex);
    while (gate_inside > 0 && rc != ETIMEDOUT)
        rc = deadline_ns == 0 ? pthread_cond_wait(&gate_moved, &gate_mutex)
                              : pthread_cond_timedwait(&gate_moved, &gate_mutex, &deadline);
    rc = gate_inside == 0;
    pthread_mutex_unlock(&gate_mutex);
    return rc != 0;
}

static bool wait_for_kernels(uint64_t deadline_ns)
{
    uint64_t end_ns = last_kernel_end();

    if (deadline_ns != 0 && end_ns > deadline_ns) {
        emu_sleep_until(deadline_ns);
        return false;
    }
    emu_sleep_until(end_ns);
    return true;
}

CUresult gate_lock(uint32_t timeout_ms)
{
    uint64_t deadline_ns = timeout_ms == 0 ? 0 : emu_now_ns() + timeout_ms * 1000000ULL;

    pthread_mutex_lock(&gate_mutex);
    if (gate_now != CU_PROCESS_STATE_RUNNING) {
        pthread_mutex_unlock(&gate_mutex);
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    gate_closing = true;
    pthread_mutex_unlock(&gate_mutex);
    if (wait_for_fault_end(deadline_ns) && wait_for_calls(deadline_ns) && wait_for_kernels(deadline_ns)) {
        gate_set(CU_PROCESS_STATE_LOCKED);
        return CUDA_SUCCESS;
    }
    gate_set(CU_PROCESS_STATE_RUNNING);
    return CUDA_ERROR_NOT_READY;
}

CUresult gate_unlock(void)
{
    if (!gate_is(CU_PROCESS_STATE_LOCKED))
        return CUDA_ERROR_ILLEGAL_STATE;
    gate_set(CU_PROCESS_STATE_RUNNING);
    return CUDA_SUCCESS;
}
