#include "view.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

NVML_EXPORT(nvmlDeviceGetCount_v2, unsigned *count)
{
    struct view view;
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = visible_count();
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetCount, unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

/* Returns a handle if the GPU is not lost. */
static nvmlReturn_t return_handle(nvmlDevice_t found, nvmlDevice_t *device)
{
    struct view view;
    nvmlReturn_t rc = view_gpu(&view, found);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    *device = found;
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetHandleByIndex_v2, unsigned index, nvmlDevice_t *device)
{
    struct view view;
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    if (device == NULL || visible_at(index) == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    return return_handle(visible_at(index), device);
}

NVML_EXPORT(nvmlDeviceGetHandleByIndex, unsigned index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

typedef bool (*matcher)(const struct emu_gpu *gpu, const void *wanted);

static nvmlReturn_t find(matcher matches, const void *wanted, nvmlDevice_t *device)
{
    struct view view;
    nvmlDevice_t found = NULL;
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    for (unsigned minor = 0; minor < view.state->gpu_count && wanted != NULL && found == NULL; minor++)
        if (matches(&view.state->gpus[minor], wanted))
            found = visible_by_minor(minor);
    view_close(&view);
    if (wanted == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    return found == NULL ? NVML_ERROR_NOT_FOUND : return_handle(found, device);
}

static bool by_uuid(const struct emu_gpu *gpu, const void *wanted)
{
    return memcmp(gpu->uuid, wanted, sizeof(gpu->uuid)) == 0;
}

static bool by_serial(const struct emu_gpu *gpu, const void *wanted)
{
    return strcmp(gpu->serial, wanted) == 0;
}

/* Domains are written with four or eight digits, with or without the function. */
static bool by_bus_id(const struct emu_gpu *gpu, const void *wanted)
{
    unsigned domain, bus, device, function = 0;
    int fields = sscanf(wanted, "%x:%x:%x.%x", &domain, &bus, &device, &function);

    if (fields < 3) {
        domain = 0;
        if (sscanf(wanted, "%x:%x.%x", &bus, &device, &function) < 2)
            return false;
    }
    return domain == gpu->pci_domain && bus == gpu->pci_bus && device == gpu->pci_device && function == 0;
}

NVML_EXPORT(nvmlDeviceGetHandleByUUID, const char *text, nvmlDevice_t *device)
{
    uint8_t uuid[16];

    if (text != NULL && (strncmp(text, "GPU-", 4) != 0 || !emu_uuid_parse(text, uuid)))
        return find(by_serial, "", device) == NVML_ERROR_UNINITIALIZED ? NVML_ERROR_UNINITIALIZED : NVML_ERROR_NOT_FOUND;
    return find(by_uuid, text == NULL ? NULL : uuid, device);
}

NVML_EXPORT(nvmlDeviceGetHandleByUUIDV, const nvmlUUID_v1_t *wanted, nvmlDevice_t *device)
{
    char text[42] = "";

    if (wanted == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (wanted->type == 2)
        return find(by_uuid, wanted->value.bytes, device);
    if (wanted->type != 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    memcpy(text, wanted->value.str, sizeof(wanted->value.str));
    return nvmlDeviceGetHandleByUUID(text, device);
}

NVML_EXPORT(nvmlDeviceGetHandleBySerial, const char *serial, nvmlDevice_t *device)
{
    return find(by_serial, serial, device);
}

NVML_EXPORT(nvmlDeviceGetHandleByPciBusId_v2, const char *bus_id, nvmlDevice_t *device)
{
    return find(by_bus_id, bus_id, device);
}

NVML_EXPORT(nvmlDeviceGetHandleByPciBusId, const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

NVML_EXPORT(nvmlDeviceGetIndex, nvmlDevice_t device, unsigned *out)
{
    struct view view;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    return out == NULL ? NVML_ERROR_INVALID_ARGUMENT : visible_index(device, out);
}

NVML_GPU_VALUE(nvmlDeviceGetMinorNumber, unsigned, view.minor)
