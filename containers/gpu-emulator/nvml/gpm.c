/* Performance counters of Hopper and later: the activity of a GPU between two samples. A sample is the time of its
 * creation. The engine and the SMs are busy while a kernel runs, memory a third of that time, tensor cores never. As on an
 * H200, a context keeps the engine busy for 62 us a second, idle or not, however many contexts there are. */
#include "view.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#define HOPPER 9

struct gpm_sample {
    uint64_t taken_ns;
    nvmlDevice_t device;
};

/* The beginning of nvmlGpmMetricsGet_t, and one of its metrics. */
struct gpm_metric {
    unsigned id, rc;
    double value;
    void *info[3];
};

struct gpm_request {
    unsigned version, count;
    struct gpm_sample *from, *to;
    struct gpm_metric metrics[];
};

enum { GRAPHICS_UTIL = 1, SM_UTIL = 2, ANY_TENSOR_UTIL = 5, DRAM_BW_UTIL = 10 };

_Static_assert(sizeof(struct gpm_metric) == 40 && sizeof(struct gpm_request) == 24, "as in the interface");

NVML_EXPORT(nvmlGpmQueryDeviceSupport, nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    struct view view;
    nvmlReturn_t rc = support == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    support->isSupportedDevice = view.gpu->architecture >= HOPPER;
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlGpmSampleAlloc, struct gpm_sample **out)
{
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = calloc(1, sizeof(**out));
    return *out == NULL ? NVML_ERROR_UNKNOWN : NVML_SUCCESS;
}

NVML_EXPORT(nvmlGpmSampleFree, struct gpm_sample *sample)
{
    free(sample);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlGpmSampleGet, nvmlDevice_t device, struct gpm_sample *sample)
{
    struct view view;
    nvmlReturn_t rc = sample == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    if (view.gpu->architecture < HOPPER)
        rc = NVML_ERROR_NOT_SUPPORTED;
    else
        *sample = (struct gpm_sample){.taken_ns = emu_now_ns(), .device = device};
    view_close(&view);
    return rc;
}

#define KEPT_BUSY 62e-6

static bool has_context(const struct view *view)
{
    for (int slot = 0; slot < EMU_MAX_PROCS; slot++) {
        const struct emu_proc *proc = &view->state->procs[slot];

        if (proc->used && proc->gpu[view->minor].contexts > 0)
            return true;
    }
    return false;
}

static double metric(unsigned id, double busy, double kept)
{
    switch (id) {
    case GRAPHICS_UTIL:
        return 100 * (busy > kept ? busy : kept);
    case SM_UTIL:
        return 100 * busy;
    case DRAM_BW_UTIL:
        return 100 * busy / 3;
    case ANY_TENSOR_UTIL:
        return 0;
    default:
        return NAN;
    }
}

NVML_EXPORT(nvmlGpmMetricsGet, struct gpm_request *request)
{
    struct view view;
    uint64_t length_ns;
    double busy, kept;
    nvmlReturn_t rc;

    if (request == NULL || request->from == NULL || request->to == NULL || request->to->taken_ns <= request->from->taken_ns)
        return NVML_ERROR_INVALID_ARGUMENT;
    rc = view_gpu(&view, request->to->device);
    if (rc != NVML_SUCCESS)
        return rc;
    length_ns = request->to->taken_ns - request->from->taken_ns;
    busy = (double)emu_busy_ns(view.gpu, EMU_ANYONE, request->from->taken_ns, request->to->taken_ns) / (double)length_ns;
    kept = has_context(&view) ? KEPT_BUSY : 0;
    for (unsigned at = 0; at < request->count; at++) {
        request->metrics[at].value = metric(request->metrics[at].id, busy, kept);
        request->metrics[at].rc = isnan(request->metrics[at].value) ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
    }
    view_close(&view);
    return NVML_SUCCESS;
}
