/* Processes on a GPU. PIDs are those of the caller's PID namespace; a process that is not visible there (in or outside of
 * another container) is not listed, but its memory counts. */
#include "view.h"

#include <string.h>

/* Age limit of the utilization of processes. */
#define SAMPLES_NS 10000000000ULL

typedef void (*put_process)(void *array, unsigned at, unsigned pid, uint64_t bytes);

static void put_v1(void *array, unsigned at, unsigned pid, uint64_t bytes)
{
    ((nvmlProcessInfo_v1_t *)array)[at] = (nvmlProcessInfo_v1_t){.pid = pid, .usedGpuMemory = bytes};
}

static void put_v2(void *array, unsigned at, unsigned pid, uint64_t bytes)
{
    ((nvmlProcessInfo_t *)array)[at] = (nvmlProcessInfo_t){.pid = pid, .usedGpuMemory = bytes, .gpuInstanceId = NVML_NO_INSTANCE,
                                                           .computeInstanceId = NVML_NO_INSTANCE};
}

static void put_detail(void *array, unsigned at, unsigned pid, uint64_t bytes)
{
    ((nvmlProcessDetail_v1_t *)array)[at] =
        (nvmlProcessDetail_v1_t){.pid = pid, .usedGpuMemory = bytes, .gpuInstanceId = NVML_NO_INSTANCE,
                                 .computeInstanceId = NVML_NO_INSTANCE};
}

static nvmlReturn_t list(nvmlDevice_t device, unsigned *count, void *array, put_process put)
{
    struct view view;
    unsigned found = 0, room;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    if (count == NULL || (*count > 0 && array == NULL)) {
        view_close(&view);
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    room = *count;
    for (int slot = 0; slot < EMU_MAX_PROCS; slot++) {
        const struct emu_proc *proc = &view.state->procs[slot];
        pid_t pid;

        if (!proc->used || proc->gpu[view.minor].contexts == 0 || (pid = emu_slot_pid(view.state, slot)) <= 0)
            continue;
        if (found < room)
            put(array, found, (unsigned)pid, emu_proc_bytes(view.state, proc, view.minor));
        found++;
    }
    view_close(&view);
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t none(nvmlDevice_t device, unsigned *count)
{
    struct view view;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetComputeRunningProcesses, nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos)
{
    return list(device, count, infos, put_v1);
}

NVML_EXPORT(nvmlDeviceGetComputeRunningProcesses_v2, nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos)
{
    return list(device, count, infos, put_v2);
}

NVML_EXPORT(nvmlDeviceGetComputeRunningProcesses_v3, nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos)
{
    return list(device, count, infos, put_v2);
}

#define NO_PROCESSES(name)                                                                                                     \
    NVML_EXPORT(name, nvmlDevice_t device, unsigned *count, void *infos)                                                       \
    {                                                                                                                          \
        (void)infos;                                                                                                           \
        return none(device, count);                                                                                            \
    }

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

NVML_EXPORT(nvmlDeviceGetRunningProcessDetailList, nvmlDevice_t device, nvmlProcessDetailList_v1_t *out)
{
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (out->version != NVML_VERSION(nvmlProcessDetailList_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (out->mode == 1 || out->mode == 2) /* graphics, MPS */
        return none(device, &out->numProcArrayEntries);
    return list(device, &out->numProcArrayEntries, out->procArray, put_detail);
}

struct sample {
    unsigned pid, percent;
};

/* Processes that ran a kernel after `since_us` (0: within the last sample period), with the share of the time since then.
 */
static nvmlReturn_t sample(nvmlDevice_t device, uint64_t since_us, struct sample out[EMU_MAX_PROCS], unsigned *count, uint64_t *now_us)
{
    struct view view;
    uint64_t now_ns = emu_now_ns(), from_ns = since_us * 1000;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    if (since_us == 0)
        from_ns = now_ns - view.state->sample_period_ns;
    if (from_ns + SAMPLES_NS < now_ns)
        from_ns = now_ns - SAMPLES_NS;
    if (from_ns >= now_ns)
        from_ns = now_ns - 1;
    *now_us = now_ns / 1000;
    *count = 0;
    if (view.gpu->util_unsupported)
        rc = NVML_ERROR_NOT_SUPPORTED;
    for (int slot = 0; slot < EMU_MAX_PROCS && rc == NVML_SUCCESS; slot++) {
        const struct emu_proc *proc = &view.state->procs[slot];
        uint64_t busy_ns = proc->used ? emu_busy_ns(view.gpu, proc->serial, from_ns, now_ns) : 0;
        pid_t pid;

        if (busy_ns == 0 || (pid = emu_slot_pid(view.state, slot)) <= 0)
            continue;
        out[(*count)++] = (struct sample){(unsigned)pid, (unsigned)(busy_ns * 100 / (now_ns - from_ns))};
    }
    view_close(&view);
    return rc != NVML_SUCCESS ? rc : *count == 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetProcessUtilization, nvmlDevice_t device, nvmlProcessUtilizationSample_t *out, unsigned *count,
            unsigned long long since_us)
{
    struct sample samples[EMU_MAX_PROCS];
    unsigned found, room;
    uint64_t now_us;
    nvmlReturn_t rc;

    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    rc = sample(device, since_us, samples, &found, &now_us);
    if (rc != NVML_SUCCESS)
        return rc;
    room = out == NULL ? 0 : *count;
    *count = out == NULL ? EMU_MAX_PROCS : found;
    if (found > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned at = 0; at < found; at++)
        out[at] = (nvmlProcessUtilizationSample_t){.pid = samples[at].pid, .timeStamp = now_us, .smUtil = samples[at].percent,
                                                   .memUtil = samples[at].percent / 3};
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetProcessesUtilizationInfo, nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *out)
{
    struct sample samples[EMU_MAX_PROCS];
    unsigned found, room;
    uint64_t now_us;
    nvmlReturn_t rc;

    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (out->version != NVML_VERSION(nvmlProcessesUtilizationInfo_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    rc = sample(device, out->lastSeenTimeStamp, samples, &found, &now_us);
    if (rc != NVML_SUCCESS)
        return rc;
    room = out->procUtilArray == NULL ? 0 : out->processSamplesCount;
    out->processSamplesCount = out->procUtilArray == NULL ? EMU_MAX_PROCS : found;
    if (found > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned at = 0; at < found; at++)
        out->procUtilArray[at] = (nvmlProcessUtilizationInfo_v1_t){.pid = samples[at].pid, .timeStamp = now_us,
                                                                   .smUtil = samples[at].percent,
                                                                   .memUtil = samples[at].percent / 3};
    return NVML_SUCCESS;
}
