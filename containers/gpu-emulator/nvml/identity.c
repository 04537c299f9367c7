#include "view.h"

#include <stdio.h>
#include <string.h>

static nvmlReturn_t answer_text(nvmlDevice_t device, char *out, unsigned length, void (*write)(const struct view *, char *))
{
    struct view view;
    char text[128];
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    write(&view, text);
    view_close(&view);
    return copy_text(out, length, text);
}

static void write_name(const struct view *view, char *out)
{
    strcpy(out, view->gpu->name);
}

static void write_uuid(const struct view *view, char *out)
{
    emu_uuid_text(view->gpu->uuid, out);
}

static void write_serial(const struct view *view, char *out)
{
    strcpy(out, view->gpu->serial);
}

static void write_vbios(const struct view *view, char *out)
{
    snprintf(out, 128, "92.00.45.%02X.01", view->minor);
}

static void write_part(const struct view *view, char *out)
{
    snprintf(out, 128, "692-2G506-%04X-%03u", view->gpu->pci_device_id >> 16, view->minor);
}

NVML_EXPORT(nvmlDeviceGetName, nvmlDevice_t device, char *name, unsigned length)
{
    return answer_text(device, name, length, write_name);
}

NVML_EXPORT(nvmlDeviceGetUUID, nvmlDevice_t device, char *uuid, unsigned length)
{
    return answer_text(device, uuid, length, write_uuid);
}

NVML_EXPORT(nvmlDeviceGetSerial, nvmlDevice_t device, char *serial, unsigned length)
{
    return answer_text(device, serial, length, write_serial);
}

NVML_EXPORT(nvmlDeviceGetVbiosVersion, nvmlDevice_t device, char *version, unsigned length)
{
    return answer_text(device, version, length, write_vbios);
}

NVML_EXPORT(nvmlDeviceGetBoardPartNumber, nvmlDevice_t device, char *number, unsigned length)
{
    return answer_text(device, number, length, write_part);
}

/* The PCI structures begin with the same fields; the newest also has the address in the long form. */
static nvmlReturn_t answer_pci(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    struct view view;
    nvmlReturn_t rc = view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    *out = (nvmlPciInfo_t){.domain = view.gpu->pci_domain, .bus = view.gpu->pci_bus, .device = view.gpu->pci_device,
                           .pciDeviceId = view.gpu->pci_device_id, .pciSubSystemId = view.gpu->pci_subsystem_id};
    snprintf(out->busIdLegacy, sizeof(out->busIdLegacy), "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    emu_bus_id(view.gpu, out->busId);
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetPciInfo_v3, nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return pci == NULL ? NVML_ERROR_INVALID_ARGUMENT : answer_pci(device, pci);
}

NVML_EXPORT(nvmlDeviceGetPciInfo_v2, nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    nvmlPciInfo_t full;
    nvmlReturn_t rc = pci == NULL ? NVML_ERROR_INVALID_ARGUMENT : answer_pci(device, &full);

    if (rc != NVML_SUCCESS)
        return rc;
    *pci = (nvmlPciInfo_v2_t){.domain = full.domain, .bus = full.bus, .device = full.device, .pciDeviceId = full.pciDeviceId,
                              .pciSubSystemId = full.pciSubSystemId};
    memcpy(pci->busId, full.busIdLegacy, sizeof(pci->busId));
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetPciInfoExt, nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci)
{
    nvmlPciInfo_t full;
    nvmlReturn_t rc;

    if (pci == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (pci->version != NVML_VERSION(nvmlPciInfoExt_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    rc = answer_pci(device, &full);
    if (rc != NVML_SUCCESS)
        return rc;
    *pci = (nvmlPciInfoExt_v1_t){.version = pci->version, .domain = full.domain, .bus = full.bus, .device = full.device,
                                 .pciDeviceId = full.pciDeviceId, .pciSubSystemId = full.pciSubSystemId, .baseClass = 3,
                                 .subClass = 2};
    memcpy(pci->busId, full.busId, sizeof(pci->busId));
    return NVML_SUCCESS;
}

NVML_EXPORT(nvmlDeviceGetCudaComputeCapability, nvmlDevice_t device, int *major, int *minor)
{
    struct view view;
    nvmlReturn_t rc = major == NULL || minor == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);

    if (rc != NVML_SUCCESS)
        return rc;
    *major = view.gpu->cc_major;
    *minor = view.gpu->cc_minor;
    view_close(&view);
    return NVML_SUCCESS;
}

NVML_GPU_VALUE(nvmlDeviceGetBrand, unsigned, strncmp(view.gpu->name, "Tesla", 5) == 0 ? 2 : 14)
NVML_GPU_VALUE(nvmlDeviceGetArchitecture, unsigned, view.gpu->architecture)
NVML_GPU_VALUE(nvmlDeviceGetMemoryBusWidth, unsigned, view.gpu->bus_width)
NVML_GPU_VALUE(nvmlDeviceGetNumGpuCores, unsigned, view.gpu->multiprocessors * (view.gpu->cc_major == 8 && view.gpu->cc_minor == 0 ? 64 : 128))
NVML_GPU_VALUE(nvmlDeviceGetBoardId, unsigned, view.gpu->pci_bus << 8)
NVML_GPU_VALUE(nvmlDeviceGetMultiGpuBoard, unsigned, 0)
NVML_GPU_VALUE(nvmlDeviceGetPersistenceMode, unsigned, view.gpu->persistence)
NVML_GPU_VALUE(nvmlDeviceGetComputeMode, unsigned, 0)
NVML_GPU_VALUE(nvmlDeviceGetDisplayMode, unsigned, NVML_FEATURE_DISABLED)
NVML_GPU_VALUE(nvmlDeviceGetDisplayActive, unsigned, NVML_FEATURE_DISABLED)
