/* Activity of a GPU: memory, utilization, power, clocks, temperature. */
#include "view.h"

NVML_EXPORT(nvmlDeviceGetMemoryInfo_v2, nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct view view;
    nvmlReturn_t rc;

    if (memory == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != NVML_VERSION(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    rc = view_gpu(&view, device);
    if (rc != NVML_SUCCESS)
        return rc;
    memory->total = view.gpu->total_bytes;
    memory->reserved = view.gpu->reserved_bytes;
    memory->free = emu_free_bytes(view.state, view.minor);
    memory->used = memory->total - memory->reserved - memory->free;
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetMemoryInfo, nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlMemory_v2_t full = {.version = NVML_VERSION(nvmlMemory_v2_t, 2)};
    nvmlReturn_t rc = memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : nvmlDeviceGetMemoryInfo_v2(device, &full);

    if (rc == NVML_SUCCESS) /* memory that the driver reserves counts as used here */
        *memory = (nvmlMemory_t){.total = full.total, .free = full.free, .used = full.used + full.reserved};
    return rc;
}

NVML_EXPORT(nvmlDeviceGetBAR1MemoryInfo, nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    struct view view;
    nvmlReturn_t rc = memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    *memory = (nvmlBAR1Memory_t){.bar1Total = 131072 * EMU_MIB, .bar1Used = EMU_MIB};
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetUtilizationRates, nvmlDevice_t device, nvmlUtilization_t *rates)
{
    struct view view;
    nvmlReturn_t rc = rates == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    if (view.gpu->util_unsupported) {
        rc = NVML_ERROR_NOT_SUPPORTED;
    } else {
        rates->gpu = emu_utilization(view.state, view.gpu, emu_now_ns());
        rates->memory = rates->gpu / 3; /* assume that a third of the time of kernels was spent on memory */
    }
    view_close(&view);
    return rc;
}

static nvmlReturn_t answer_idle_engine(nvmlDevice_t device, unsigned *percent, unsigned *period_us)
{
    struct view view;
    nvmlReturn_t rc = percent == NULL || period_us == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    *percent = 0;
    *period_us = (unsigned)(view.state->sample_period_ns / 1000);
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetEncoderUtilization, nvmlDevice_t device, unsigned *percent, unsigned *period_us)
{
    return answer_idle_engine(device, percent, period_us);
}

NVML_EXPORT(nvmlDeviceGetDecoderUtilization, nvmlDevice_t device, unsigned *percent, unsigned *period_us)
{
    return answer_idle_engine(device, percent, period_us);
}

NVML_EXPORT(nvmlDeviceGetPowerManagementLimitConstraints, nvmlDevice_t device, unsigned *least, unsigned *most)
{
    struct view view;
    nvmlReturn_t rc = least == NULL || most == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    *least = view.gpu->power_limit_mw / 4;
    *most = view.gpu->power_limit_mw;
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetTemperature, nvmlDevice_t device, unsigned sensor, unsigned *degrees)
{
    struct view view;
    bool known = degrees != NULL && sensor == NVML_TEMPERATURE_GPU;
    nvmlReturn_t rc = known ? view_gpu(&view, device) : NVML_ERROR_INVALID_ARGUMENT;

    if (rc != NVML_SUCCESS)
        return rc;
    *degrees = 31 + emu_utilization(view.state, view.gpu, emu_now_ns()) * 35 / 100;
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetTemperatureV, nvmlDevice_t device, nvmlTemperature_v1_t *out)
{
    unsigned degrees;
    nvmlReturn_t rc;

    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (out->version != NVML_VERSION(nvmlTemperature_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    rc = nvmlDeviceGetTemperature(device, out->sensorType, &degrees);
    if (rc == NVML_SUCCESS)
        out->temperature = (int)degrees;
    return rc;
}

/* The SM clock is lower on an idle GPU; the memory clock is constant. */
static nvmlReturn_t answer_clock(nvmlDevice_t device, unsigned type, unsigned *mhz, bool highest)
{
    struct view view;
    bool known = mhz != NULL && type < NVML_CLOCK_COUNT;
    nvmlReturn_t rc = known ? view_gpu(&view, device) : NVML_ERROR_INVALID_ARGUMENT;

    if (rc != NVML_SUCCESS)
        return rc;
    if (type == NVML_CLOCK_MEM)
        *mhz = view.gpu->mem_clock_mhz;
    else if (highest || emu_utilization(view.state, view.gpu, emu_now_ns()) > 0)
        *mhz = view.gpu->sm_clock_mhz;
    else
        *mhz = 210;
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetClockInfo, nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return answer_clock(device, type, mhz, false);
}

NVML_EXPORT(nvmlDeviceGetMaxClockInfo, nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return answer_clock(device, type, mhz, true);
}

NVML_EXPORT(nvmlDeviceGetApplicationsClock, nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return answer_clock(device, type, mhz, true);
}

NVML_EXPORT(nvmlDeviceGetClock, nvmlDevice_t device, unsigned type, unsigned id, unsigned *mhz)
{
    return answer_clock(device, type, mhz, id != 0);
}

NVML_GPU_VALUE(nvmlDeviceGetPowerUsage, unsigned, emu_power_mw(view.state, view.gpu, now_ns))
NVML_GPU_VALUE(nvmlDeviceGetEnforcedPowerLimit, unsigned, view.gpu->power_limit_mw)
NVML_GPU_VALUE(nvmlDeviceGetPowerManagementLimit, unsigned, view.gpu->power_limit_mw)
NVML_GPU_VALUE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, view.gpu->power_limit_mw)
NVML_GPU_VALUE(nvmlDeviceGetPowerManagementMode, unsigned, NVML_FEATURE_ENABLED)
NVML_GPU_VALUE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, emu_energy_mj(view.state, view.gpu, now_ns))
NVML_GPU_VALUE(nvmlDeviceGetPerformanceState, unsigned, emu_used_bytes(view.state, view.minor) > 0 ? 0 : 8)
NVML_GPU_VALUE(nvmlDeviceGetPowerState, unsigned, emu_used_bytes(view.state, view.minor) > 0 ? 0 : 8)
NVML_GPU_VALUE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, emu_utilization(view.state, view.gpu, now_ns) > 0 ? 0 : 1)
NVML_GPU_VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, emu_utilization(view.state, view.gpu, now_ns) > 0 ? 0 : 1)
NVML_GPU_VALUE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 4)
NVML_GPU_VALUE(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NVML_GPU_VALUE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 4)
NVML_GPU_VALUE(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
NVML_GPU_VALUE(nvmlDeviceGetPcieReplayCounter, unsigned, 0)
