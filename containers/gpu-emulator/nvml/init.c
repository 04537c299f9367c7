#include "view.h"

#include <string.h>

struct nvmlDevice_st {
    unsigned minor;
};

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned init_count;
static unsigned shown_count;
static struct nvmlDevice_st shown[EMU_MAX_GPUS];

static void list_gpus(const struct emu_state *state)
{
    unsigned minors[EMU_MAX_GPUS];

    shown_count = emu_visible(state, minors);
    for (unsigned index = 0; index < shown_count; index++)
        shown[index].minor = minors[index];
}

NVML_EXPORT(nvmlInitWithFlags, unsigned flags)
{
    nvmlReturn_t rc = NVML_SUCCESS;

    pthread_mutex_lock(&init_mutex);
    if (init_count == 0) {
        struct emu_state *state = emu_attach();

        if (state == NULL || state->nvml_lost)
            rc = NVML_ERROR_DRIVER_NOT_LOADED;
        else
            list_gpus(state);
        if (rc == NVML_SUCCESS && shown_count == 0 && !(flags & NVML_INIT_NO_GPUS))
            rc = NVML_ERROR_NOT_FOUND;
        if (state != NULL)
            emu_detach();
    }
    if (rc == NVML_SUCCESS)
        init_count++;
    pthread_mutex_unlock(&init_mutex);
    return rc;
}

NVML_EXPORT(nvmlInit_v2, void)
{
    return nvmlInitWithFlags(0);
}

NVML_EXPORT(nvmlInit, void)
{
    return nvmlInitWithFlags(0);
}

NVML_EXPORT(nvmlShutdown, void)
{
    nvmlReturn_t rc = NVML_ERROR_UNINITIALIZED;

    pthread_mutex_lock(&init_mutex);
    if (init_count > 0) {
        init_count--;
        rc = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&init_mutex);
    return rc;
}

nvmlReturn_t view_node(struct view *view)
{
    unsigned initialized;

    pthread_mutex_lock(&init_mutex);
    initialized = init_count;
    pthread_mutex_unlock(&init_mutex);
    *view = (struct view){0};
    if (initialized == 0)
        return NVML_ERROR_UNINITIALIZED;
    view->state = emu_attach();
    if (view->state == NULL)
        return NVML_ERROR_UNKNOWN;
    emu_lock(view->state);
    if (view->state->nvml_lost) {
        view_close(view);
        return NVML_ERROR_UNKNOWN;
    }
    emu_sweep(view->state);
    return NVML_SUCCESS;
}

void view_close(struct view *view)
{
    emu_unlock(view->state);
    emu_detach();
    view->state = NULL;
}

nvmlReturn_t view_gpu(struct view *view, nvmlDevice_t device)
{
    nvmlReturn_t rc = view_node(view);

    if (rc != NVML_SUCCESS)
        return rc;
    rc = visible_minor(device, &view->minor);
    if (rc == NVML_SUCCESS && view->minor >= view->state->gpu_count)
        rc = NVML_ERROR_GPU_IS_LOST; /* the node was initialized again with fewer GPUs */
    if (rc == NVML_SUCCESS) {
        view->gpu = &view->state->gpus[view->minor];
        if (view->gpu->lost)
            rc = NVML_ERROR_GPU_IS_LOST;
    }
    if (rc != NVML_SUCCESS)
        view_close(view);
    return rc;
}

unsigned visible_count(void)
{
    return shown_count;
}

nvmlDevice_t visible_at(unsigned index)
{
    return index < shown_count ? &shown[index] : NULL;
}

nvmlReturn_t visible_index(nvmlDevice_t device, unsigned *index)
{
    for (unsigned at = 0; at < shown_count; at++) {
        if (device == &shown[at]) {
            *index = at;
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t visible_minor(nvmlDevice_t device, unsigned *minor)
{
    unsigned index;
    nvmlReturn_t rc = visible_index(device, &index);

    if (rc == NVML_SUCCESS)
        *minor = shown[index].minor;
    return rc;
}

nvmlDevice_t visible_by_minor(unsigned minor)
{
    for (unsigned at = 0; at < shown_count; at++)
        if (shown[at].minor == minor)
            return &shown[at];
    return NULL;
}

nvmlReturn_t copy_text(char *out, unsigned length, const char *text)
{
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return NVML_SUCCESS;
}
