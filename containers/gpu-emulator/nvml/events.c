#include "view.h"

#include <stdlib.h>

/* An event set receives the events of a GPU since its registration, in order; of more than EMU_EVENTS pending events the
 * oldest are lost. */
struct nvmlEventSet_st {
    uint64_t wanted[EMU_MAX_GPUS]; /* event types, by minor */
    uint64_t next;                 /* number of the next event to read */
    bool started;
};

NVML_EXPORT(nvmlEventSetCreate, nvmlEventSet_t *set)
{
    struct view view;
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof(**set));
    return *set == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

NVML_EXPORT(nvmlEventSetFree, nvmlEventSet_t set)
{
    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

NVML_GPU_VALUE(nvmlDeviceGetSupportedEventTypes, unsigned long long, NVML_EVENT_SUPPORTED)

NVML_EXPORT(nvmlDeviceRegisterEvents, nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct view view;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    if (set == NULL) {
        rc = NVML_ERROR_INVALID_ARGUMENT;
    } else if (types & ~NVML_EVENT_SUPPORTED) {
        rc = NVML_ERROR_NOT_SUPPORTED;
    } else {
        if (!set->started)
            set->next = view.state->event_count;
        set->started = true;
        set->wanted[view.minor] |= types;
    }
    view_close(&view);
    return rc;
}

static bool next_event(struct view *view, nvmlEventSet_t set, struct emu_event *out)
{
    const struct emu_state *state = view->state;

    if (set->next > state->event_count) /* the node was initialized again */
        set->next = 0;
    if (state->event_count - set->next > EMU_EVENTS)
        set->next = state->event_count - EMU_EVENTS;
    while (set->next < state->event_count) {
        const struct emu_event *event = &state->events[set->next++ % EMU_EVENTS];

        if (set->wanted[event->gpu] & event->type && visible_by_minor(event->gpu) != NULL) {
            *out = *event;
            return true;
        }
    }
    return false;
}

/* The state stays attached during the wait, so that the futex word stays mapped. */
static nvmlReturn_t wait_event(nvmlEventSet_t set, struct emu_event *event, unsigned timeout_ms)
{
    uint64_t deadline_ns = emu_now_ns() + timeout_ms * 1000000ULL;
    nvmlReturn_t rc = NVML_SUCCESS;

    if (emu_attach() == NULL)
        return NVML_ERROR_UNKNOWN;
    for (;;) {
        struct view view;
        struct emu_state *state;
        uint32_t seen;
        bool found;

        rc = view_node(&view);
        if (rc != NVML_SUCCESS)
            break;
        state = view.state;
        seen = __atomic_load_n(&state->event_futex, __ATOMIC_ACQUIRE);
        found = next_event(&view, set, event);
        view_close(&view);
        if (found)
            break;
        rc = NVML_ERROR_TIMEOUT;
        if (emu_now_ns() >= deadline_ns || !emu_futex_wait(&state->event_futex, seen, deadline_ns))
            break;
    }
    emu_detach();
    return rc;
}

NVML_EXPORT(nvmlEventSetWait_v2, nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    struct emu_event event;
    nvmlReturn_t rc;

    if (set == NULL || data == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    rc = wait_event(set, &event, timeout_ms);
    if (rc == NVML_SUCCESS)
        *data = (nvmlEventData_t){.device = visible_by_minor(event.gpu), .eventType = event.type, .eventData = event.data,
                                  .gpuInstanceId = NVML_NO_INSTANCE, .computeInstanceId = NVML_NO_INSTANCE};
    return rc;
}

NVML_EXPORT(nvmlEventSetWait, nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned timeout_ms)
{
    nvmlEventData_t full;
    nvmlReturn_t rc = data == NULL ? NVML_ERROR_INVALID_ARGUMENT : nvmlEventSetWait_v2(set, &full, timeout_ms);

    if (rc == NVML_SUCCESS)
        *data = (nvmlEventData_v1_t){.device = full.device, .eventType = full.eventType, .eventData = full.eventData};
    return rc;
}
