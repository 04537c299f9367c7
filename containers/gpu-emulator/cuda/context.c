#include "internal.h"

#include <stdlib.h>

#define STACK 64

static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

bool context_exists(CUcontext context)
{
    for (CUcontext at = cuda.contexts; at != NULL; at = at->next)
        if (at == context)
            return at->active;
    return false;
}

CUcontext current_context(void)
{
    return depth > 0 && context_exists(stack[depth - 1]) ? stack[depth - 1] : NULL;
}

struct gpu *gpu_of(CUdevice device)
{
    return device < 0 || (unsigned)device >= cuda.ordinal_count ? NULL : &cuda.gpus[cuda.ordinals[device]];
}

/* A lost GPU and an error that ended the contexts on it are permanent errors. */
CUresult context_health(CUcontext context)
{
    const struct emu_gpu *gpu = &cuda.state->gpus[gpu_of((CUdevice)context->ordinal)->minor];

    if (context->broken == CUDA_SUCCESS) {
        if (gpu->lost)
            context->broken = CUDA_ERROR_UNKNOWN;
        else if (gpu->poison_epoch != context->poison_epoch)
            context->broken = (CUresult)gpu->poison_error;
    }
    return context->broken;
}

CUresult enter_context(CUcontext *context)
{
    CUresult rc = enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    *context = current_context();
    rc = *context == NULL ? CUDA_ERROR_INVALID_CONTEXT : context_health(*context);
    pthread_mutex_unlock(&cuda.mutex);
    if (rc != CUDA_SUCCESS)
        leave();
    return rc;
}

uint64_t last_kernel_end(void)
{
    uint64_t end_ns = 0;

    pthread_mutex_lock(&cuda.mutex);
    for (CUcontext at = cuda.contexts; at != NULL; at = at->next)
        if (at->end_ns > end_ns)
            end_ns = at->end_ns;
    pthread_mutex_unlock(&cuda.mutex);
    return end_ns;
}

/* A context uses memory of its GPU. The caller holds cuda.mutex, here and below. */
static CUresult reserve_memory(CUcontext context)
{
    struct gpu *gpu = gpu_of((CUdevice)context->ordinal);
    struct emu_proc *proc = &cuda.state->procs[emu_slot_own()];
    const struct emu_gpu *shared = &cuda.state->gpus[gpu->minor];
    CUresult rc = CUDA_SUCCESS;

    if (shared->lost)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    emu_lock(cuda.state);
    emu_sweep(cuda.state);
    if (emu_free_bytes(cuda.state, gpu->minor) < cuda.state->context_bytes)
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    else
        proc->gpu[gpu->minor].contexts = ++gpu->contexts;
    context->poison_epoch = shared->poison_epoch;
    emu_unlock(cuda.state);
    if (rc == CUDA_SUCCESS) {
        context->active = true;
        context->broken = CUDA_SUCCESS;
    }
    return rc;
}

static void release_memory(CUcontext context)
{
    struct gpu *gpu = gpu_of((CUdevice)context->ordinal);

    streams_drop(context);
    memory_drop(context);
    context->active = false;
    context->end_ns = 0;
    emu_lock(cuda.state);
    cuda.state->procs[emu_slot_own()].gpu[gpu->minor].contexts = --gpu->contexts;
    emu_unlock(cuda.state);
}

/* Handles stay valid memory, so that a stale handle is detected. */
static CUcontext new_context(unsigned ordinal, unsigned flags, bool primary)
{
    CUcontext context = calloc(1, sizeof(*context));

    if (context == NULL)
        return NULL;
    *context = (struct CUctx_st){.next = cuda.contexts, .ordinal = ordinal, .flags = flags, .primary = primary,
                                 .id = ++cuda.next_id};
    cuda.contexts = context;
    return context;
}

static CUcontext primary_of(CUdevice device)
{
    for (CUcontext at = cuda.contexts; at != NULL; at = at->next)
        if (at->primary && at->ordinal == (unsigned)device)
            return at;
    return new_context((unsigned)device, 0, true);
}

static CUresult begin_device(CUdevice device)
{
    CUresult rc = enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    if (gpu_of(device) != NULL)
        return CUDA_SUCCESS;
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return CUDA_ERROR_INVALID_DEVICE;
}

static CUresult end(CUresult rc)
{
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

static CUresult begin_plain(void)
{
    CUresult rc = enter();

    if (rc == CUDA_SUCCESS)
        pthread_mutex_lock(&cuda.mutex);
    return rc;
}

CUDA_EXPORT(cuDevicePrimaryCtxRetain, CUcontext *out, CUdevice device)
{
    CUcontext context;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : begin_device(device);

    if (rc != CUDA_SUCCESS)
        return rc;
    context = primary_of(device);
    if (context == NULL)
        return end(CUDA_ERROR_OUT_OF_MEMORY);
    if (!context->active)
        rc = reserve_memory(context);
    if (rc != CUDA_SUCCESS)
        return end(rc);
    context->users++;
    *out = context;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuDevicePrimaryCtxRelease_v2, CUdevice device)
{
    CUcontext context;
    CUresult rc = begin_device(device);

    if (rc != CUDA_SUCCESS)
        return rc;
    context = primary_of(device);
    if (context == NULL || context->users == 0)
        return end(CUDA_ERROR_INVALID_CONTEXT);
    if (--context->users == 0 && context->active)
        release_memory(context);
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuDevicePrimaryCtxReset_v2, CUdevice device)
{
    CUcontext context;
    CUresult rc = begin_device(device);

    if (rc != CUDA_SUCCESS)
        return rc;
    context = primary_of(device);
    if (context != NULL && context->active) {
        context->users = 0;
        release_memory(context);
    }
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuDevicePrimaryCtxSetFlags_v2, CUdevice device, unsigned flags)
{
    CUcontext context;
    CUresult rc = begin_device(device);

    if (rc != CUDA_SUCCESS)
        return rc;
    context = primary_of(device);
    if (context != NULL)
        context->flags = flags;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuDevicePrimaryCtxGetState, CUdevice device, unsigned *flags, int *active)
{
    CUcontext context;
    CUresult rc = flags == NULL || active == NULL ? CUDA_ERROR_INVALID_VALUE : begin_device(device);

    if (rc != CUDA_SUCCESS)
        return rc;
    context = primary_of(device);
    *flags = context == NULL ? 0 : context->flags;
    *active = context != NULL && context->active;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxCreate_v2, CUcontext *out, unsigned flags, CUdevice device)
{
    CUcontext context;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : begin_device(device);

    if (rc != CUDA_SUCCESS)
        return rc;
    context = depth < STACK ? new_context((unsigned)device, flags, false) : NULL;
    if (context == NULL)
        return end(CUDA_ERROR_OUT_OF_MEMORY);
    rc = reserve_memory(context);
    if (rc != CUDA_SUCCESS)
        return end(rc);
    stack[depth++] = context;
    *out = context;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxCreate_v3, CUcontext *out, void *affinity, int count, unsigned flags, CUdevice device)
{
    return affinity != NULL || count != 0 ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(out, flags, device);
}

CUDA_EXPORT(cuCtxCreate_v4, CUcontext *out, void *parameters, unsigned flags, CUdevice device)
{
    (void)parameters; /* execution affinity and CIG: without effect here */
    return cuCtxCreate_v2(out, flags, device);
}

CUDA_EXPORT(cuCtxDestroy_v2, CUcontext context)
{
    CUresult rc = begin_plain();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (context == NULL || context->primary || !context_exists(context))
        return end(CUDA_ERROR_INVALID_CONTEXT);
    release_memory(context);
    if (depth > 0 && stack[depth - 1] == context)
        depth--;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxPushCurrent_v2, CUcontext context)
{
    CUresult rc = begin_plain();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!context_exists(context) || depth == STACK)
        return end(CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = context;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxPopCurrent_v2, CUcontext *out)
{
    CUresult rc = begin_plain();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (depth == 0)
        return end(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (out != NULL)
        *out = stack[depth];
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxSetCurrent, CUcontext context)
{
    CUresult rc = begin_plain();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (context != NULL && !context_exists(context))
        return end(CUDA_ERROR_INVALID_CONTEXT);
    if (context == NULL)
        depth = depth > 0 ? depth - 1 : 0;
    else if (depth == 0)
        stack[depth++] = context;
    else
        stack[depth - 1] = context;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxGetCurrent, CUcontext *out)
{
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : begin_plain();

    if (rc != CUDA_SUCCESS)
        return rc;
    *out = current_context();
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxGetDevice, CUdevice *out)
{
    CUcontext context;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : begin_plain();

    if (rc != CUDA_SUCCESS)
        return rc;
    context = current_context();
    if (context == NULL)
        return end(CUDA_ERROR_INVALID_CONTEXT);
    *out = (CUdevice)context->ordinal;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuCtxSynchronize, void)
{
    CUcontext context;
    CUresult rc = enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = wait_until(context, context->end_ns);
    leave();
    return rc;
}
