/* Streams and events. Queued work takes time, but its effects on memory are immediate, in the order of the calls. */
#include "internal.h"

#include <stdlib.h>

#define LEGACY ((CUstream)1)
#define PER_THREAD ((CUstream)2)

struct CUevent_st {
    CUevent next;
    CUcontext context;
    unsigned flags;
    bool recorded;
    uint64_t at_ns;
};

static CUevent events;

#define EVENT_NO_TIMING 2U

/* The default streams use the time of the context. cuda.mutex must be held, here and below. */
CUresult stream_of(CUcontext context, CUstream handle, uint64_t **end_ns)
{
    if (handle == NULL || handle == LEGACY || handle == PER_THREAD) {
        *end_ns = &context->end_ns;
        return CUDA_SUCCESS;
    }
    for (CUstream at = cuda.streams; at != NULL; at = at->next) {
        if (at == handle && at->context != NULL) {
            *end_ns = &at->end_ns;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_HANDLE;
}

void streams_drop(CUcontext context)
{
    for (CUstream at = cuda.streams; at != NULL; at = at->next)
        if (at->context == context)
            at->context = NULL;
    for (CUevent at = events; at != NULL; at = at->next)
        if (at->context == context)
            at->context = NULL;
}

/* After a restore nothing is queued, regardless of the clock of the other node. */
void streams_settle(uint64_t now_ns)
{
    for (CUcontext at = cuda.contexts; at != NULL; at = at->next)
        at->end_ns = at->end_ns < now_ns ? at->end_ns : now_ns;
    for (CUstream at = cuda.streams; at != NULL; at = at->next)
        at->end_ns = at->end_ns < now_ns ? at->end_ns : now_ns;
    for (CUevent at = events; at != NULL; at = at->next)
        at->at_ns = at->at_ns < now_ns ? at->at_ns : now_ns;
}

CUresult wait_until(CUcontext context, uint64_t end_ns)
{
    CUresult rc;

    emu_sleep_until(end_ns);
    pthread_mutex_lock(&cuda.mutex);
    rc = context_health(context);
    pthread_mutex_unlock(&cuda.mutex);
    return rc;
}

static CUresult begin(CUcontext *context)
{
    CUresult rc = enter_context(context);

    if (rc == CUDA_SUCCESS)
        pthread_mutex_lock(&cuda.mutex);
    return rc;
}

static CUresult end(CUresult rc)
{
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

CUDA_EXPORT(cuStreamCreateWithPriority, CUstream *out, unsigned flags, int priority)
{
    CUcontext context;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    *out = calloc(1, sizeof(**out));
    if (*out == NULL)
        return end(CUDA_ERROR_OUT_OF_MEMORY);
    **out = (struct CUstream_st){.next = cuda.streams, .context = context, .flags = flags, .priority = priority,
                                 .id = ++cuda.next_id};
    cuda.streams = *out;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuStreamCreate, CUstream *out, unsigned flags)
{
    return cuStreamCreateWithPriority(out, flags, 0);
}

CUDA_EXPORT(cuStreamDestroy_v2, CUstream stream)
{
    CUcontext context;
    uint64_t *end_ns;
    CUresult rc = begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = stream_of(context, stream, &end_ns);
    if (rc == CUDA_SUCCESS && end_ns == &context->end_ns)
        rc = CUDA_ERROR_INVALID_HANDLE;
    if (rc == CUDA_SUCCESS)
        stream->context = NULL;
    return end(rc);
}

/* Ends a call that holds cuda.mutex: waits until a time, or returns whether it has passed. */
static CUresult end_by_time(CUcontext context, uint64_t at_ns, bool wait)
{
    CUresult rc = CUDA_SUCCESS;

    pthread_mutex_unlock(&cuda.mutex);
    if (wait)
        rc = wait_until(context, at_ns);
    else if (at_ns > emu_now_ns())
        rc = CUDA_ERROR_NOT_READY;
    leave();
    return rc;
}

/* Whether all work queued in the stream is complete. */
static CUresult stream_done(CUstream stream, bool wait)
{
    CUcontext context;
    uint64_t *tail;
    CUresult rc = begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = stream_of(context, stream, &tail);
    return rc == CUDA_SUCCESS ? end_by_time(context, *tail, wait) : end(rc);
}

CUDA_EXPORT(cuStreamSynchronize, CUstream stream)
{
    return stream_done(stream, true);
}

CUDA_EXPORT(cuStreamQuery, CUstream stream)
{
    return stream_done(stream, false);
}

CUDA_EXPORT(cuEventCreate, CUevent *out, unsigned flags)
{
    CUcontext context;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    *out = calloc(1, sizeof(**out));
    if (*out == NULL)
        return end(CUDA_ERROR_OUT_OF_MEMORY);
    **out = (struct CUevent_st){.next = events, .context = context, .flags = flags};
    events = *out;
    return end(CUDA_SUCCESS);
}

static bool event_exists(CUevent event)
{
    for (CUevent at = events; at != NULL; at = at->next)
        if (at == event)
            return at->context != NULL;
    return false;
}

CUDA_EXPORT(cuEventDestroy_v2, CUevent event)
{
    CUcontext context;
    CUresult rc = begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!event_exists(event))
        return end(CUDA_ERROR_INVALID_HANDLE);
    event->context = NULL;
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuEventRecord, CUevent event, CUstream stream)
{
    CUcontext context;
    uint64_t *tail, now_ns = emu_now_ns();
    CUresult rc = begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = event_exists(event) ? stream_of(context, stream, &tail) : CUDA_ERROR_INVALID_HANDLE;
    if (rc == CUDA_SUCCESS) {
        event->recorded = true;
        event->at_ns = *tail > now_ns ? *tail : now_ns;
    }
    return end(rc);
}

CUDA_EXPORT(cuStreamWaitEvent, CUstream stream, CUevent event, unsigned flags)
{
    CUcontext context;
    uint64_t *tail;
    CUresult rc = begin(&context);

    (void)flags;
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = event_exists(event) ? stream_of(context, stream, &tail) : CUDA_ERROR_INVALID_HANDLE;
    if (rc == CUDA_SUCCESS && event->recorded && event->at_ns > *tail)
        *tail = event->at_ns;
    return end(rc);
}

/* Whether the work queued when the event was recorded is complete; true if it was never recorded. */
static CUresult event_done(CUevent event, bool wait)
{
    CUcontext context;
    CUresult rc = begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!event_exists(event))
        return end(CUDA_ERROR_INVALID_HANDLE);
    return end_by_time(context, event->recorded ? event->at_ns : 0, wait);
}

CUDA_EXPORT(cuEventSynchronize, CUevent event)
{
    return event_done(event, true);
}

CUDA_EXPORT(cuEventQuery, CUevent event)
{
    return event_done(event, false);
}

CUDA_EXPORT(cuEventElapsedTime_v2, float *ms, CUevent from, CUevent to)
{
    CUcontext context;
    uint64_t now_ns = emu_now_ns();
    CUresult rc = ms == NULL ? CUDA_ERROR_INVALID_VALUE : begin(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!event_exists(from) || !event_exists(to) || !from->recorded || !to->recorded || (from->flags | to->flags) & EVENT_NO_TIMING)
        return end(CUDA_ERROR_INVALID_HANDLE);
    if (from->at_ns > now_ns || to->at_ns > now_ns)
        return end(CUDA_ERROR_NOT_READY);
    *ms = (float)(((double)to->at_ns - (double)from->at_ns) / 1e6);
    return end(CUDA_SUCCESS);
}

CUDA_EXPORT(cuEventElapsedTime, float *ms, CUevent from, CUevent to)
{
    return cuEventElapsedTime_v2(ms, from, to);
}
