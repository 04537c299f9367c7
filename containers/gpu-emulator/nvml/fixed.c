/* Constant values: MIG and ECC are off. And the fields that monitoring tools read. */
#include "view.h"

#include <string.h>

static nvmlReturn_t answer_pair(nvmlDevice_t device, unsigned *current, unsigned *pending, bool needs_mig)
{
    struct view view;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    if (current == NULL || pending == NULL)
        rc = NVML_ERROR_INVALID_ARGUMENT;
    else if (needs_mig && !view.gpu->mig_capable)
        rc = NVML_ERROR_NOT_SUPPORTED;
    else
        *current = *pending = NVML_FEATURE_DISABLED;
    view_close(&view);
    return rc;
}

static nvmlReturn_t refuse(nvmlDevice_t device, nvmlReturn_t answer)
{
    struct view view;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    return answer;
}

NVML_EXPORT(nvmlDeviceGetMigMode, nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    return answer_pair(device, current, pending, true);
}

NVML_EXPORT(nvmlDeviceGetEccMode, nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    return answer_pair(device, current, pending, false);
}

NVML_GPU_VALUE(nvmlDeviceIsMigDeviceHandle, unsigned, 0)
NVML_GPU_VALUE(nvmlDeviceGetMaxMigDeviceCount, unsigned, view.gpu->mig_capable ? 7 : 0)

NVML_EXPORT(nvmlDeviceGetMigDeviceHandleByIndex, nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    (void)index;
    return mig == NULL ? NVML_ERROR_INVALID_ARGUMENT : refuse(device, NVML_ERROR_NOT_FOUND);
}

NVML_EXPORT(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvmlDevice_t mig, nvmlDevice_t *device)
{
    return device == NULL ? NVML_ERROR_INVALID_ARGUMENT : refuse(mig, NVML_ERROR_INVALID_ARGUMENT);
}

NVML_EXPORT(nvmlDeviceGetGpuInstanceId, nvmlDevice_t device, unsigned *id)
{
    (void)id;
    return refuse(device, NVML_ERROR_NOT_SUPPORTED);
}

NVML_EXPORT(nvmlDeviceGetComputeInstanceId, nvmlDevice_t device, unsigned *id)
{
    (void)id;
    return refuse(device, NVML_ERROR_NOT_SUPPORTED);
}

NVML_EXPORT(nvmlDeviceGetTotalEccErrors, nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *count)
{
    (void)type, (void)counter, (void)count;
    return refuse(device, NVML_ERROR_NOT_SUPPORTED);
}

NVML_EXPORT(nvmlDeviceGetFanSpeed, nvmlDevice_t device, unsigned *percent)
{
    (void)percent;
    return refuse(device, NVML_ERROR_NOT_SUPPORTED);
}

NVML_EXPORT(nvmlDeviceGetNvLinkState, nvmlDevice_t device, unsigned link, unsigned *active)
{
    (void)link, (void)active;
    return refuse(device, NVML_ERROR_NOT_SUPPORTED);
}

NVML_EXPORT(nvmlDeviceGetAccountingMode, nvmlDevice_t device, unsigned *mode)
{
    unsigned pending;

    return answer_pair(device, mode, &pending, false);
}

NVML_EXPORT(nvmlDeviceGetVirtualizationMode, nvmlDevice_t device, unsigned *mode)
{
    unsigned pending;

    return answer_pair(device, mode, &pending, false); /* 0: bare metal */
}

enum { TYPE_UINT = 1, TYPE_ULL = 3 };
enum { FI_ECC_CURRENT = 1, FI_ECC_PENDING = 2, FI_ENERGY = 83, FI_NVLINK_COUNT = 91, FI_POWER_AVERAGE = 185, FI_POWER_INSTANT = 186,
       FI_POWER_MIN = 187, FI_POWER_MAX = 188, FI_POWER_DEFAULT = 189, FI_POWER_CURRENT = 190 };

static void answer_field(const struct view *view, nvmlFieldValue_t *field, uint64_t now_ns)
{
    field->nvmlReturn = NVML_SUCCESS;
    field->valueType = TYPE_UINT;
    field->timestamp = (long long)(now_ns / 1000);
    field->latencyUsec = 0;
    memset(&field->value, 0, sizeof(field->value));
    switch (field->fieldId) {
    case FI_ECC_CURRENT:
    case FI_ECC_PENDING:
    case FI_NVLINK_COUNT:
        break;
    case FI_ENERGY:
        field->valueType = TYPE_ULL;
        field->value.ullVal = emu_energy_mj(view->state, view->gpu, now_ns);
        break;
    case FI_POWER_AVERAGE:
    case FI_POWER_INSTANT:
        field->value.uiVal = emu_power_mw(view->state, view->gpu, now_ns);
        break;
    case FI_POWER_MIN:
        field->value.uiVal = view->gpu->power_limit_mw / 4;
        break;
    case FI_POWER_MAX:
    case FI_POWER_DEFAULT:
    case FI_POWER_CURRENT:
        field->value.uiVal = view->gpu->power_limit_mw;
        break;
    default:
        field->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
}

NVML_EXPORT(nvmlDeviceGetFieldValues, nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    struct view view;
    uint64_t now_ns = emu_now_ns();
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    if (count <= 0 || fields == NULL)
        rc = NVML_ERROR_INVALID_ARGUMENT;
    for (int at = 0; at < count && rc == NVML_SUCCESS; at++)
        answer_field(&view, &fields[at], now_ns);
    view_close(&view);
    return rc;
}
