#include "internal.h"

#include <stdio.h>
#include <string.h>

/* Descriptions come from the state, which still has that of a lost GPU. */
static CUresult begin(CUdevice device, const void *out, const struct emu_gpu **gpu)
{
    CUresult rc = enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (out != NULL && device >= 0 && (unsigned)device < cuda.ordinal_count) {
        *gpu = &cuda.state->gpus[cuda.gpus[cuda.ordinals[device]].minor];
        return CUDA_SUCCESS;
    }
    leave();
    return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
}

CUDA_EXPORT(cuDeviceGetCount, int *count)
{
    CUresult rc = enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (count != NULL)
        *count = (int)cuda.ordinal_count;
    leave();
    return count == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUDA_EXPORT(cuDeviceGet, CUdevice *device, int ordinal)
{
    const struct emu_gpu *gpu;
    CUresult rc = begin(ordinal, device, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    *device = ordinal;
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuDeviceGetName, char *name, int length, CUdevice device)
{
    const struct emu_gpu *gpu;
    CUresult rc = length <= 0 ? CUDA_ERROR_INVALID_VALUE : begin(device, name, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    snprintf(name, (size_t)length, "%s", gpu->name);
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuDeviceGetUuid_v2, CUuuid *uuid, CUdevice device)
{
    const struct emu_gpu *gpu;
    CUresult rc = begin(device, uuid, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    memcpy(uuid->bytes, gpu->uuid, sizeof(uuid->bytes));
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuDeviceGetUuid, CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

CUDA_EXPORT(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device)
{
    const struct emu_gpu *gpu;
    CUresult rc = begin(device, bytes, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    *bytes = gpu->total_bytes - gpu->reserved_bytes;
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuDeviceGetPCIBusId, char *text, int length, CUdevice device)
{
    const struct emu_gpu *gpu;
    CUresult rc = length <= 12 ? CUDA_ERROR_INVALID_VALUE : begin(device, text, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    snprintf(text, (size_t)length, "%04X:%02X:%02X.0", gpu->pci_domain & 0xffff, gpu->pci_bus & 0xff, gpu->pci_device & 0xff);
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuDeviceGetByPCIBusId, CUdevice *device, const char *text)
{
    unsigned domain = 0, bus, number, function = 0;
    CUresult rc = enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = CUDA_ERROR_INVALID_DEVICE;
    if (device == NULL || text == NULL || sscanf(text, "%x:%x:%x.%x", &domain, &bus, &number, &function) < 3)
        rc = CUDA_ERROR_INVALID_VALUE;
    for (unsigned ordinal = 0; ordinal < cuda.ordinal_count && rc == CUDA_ERROR_INVALID_DEVICE; ordinal++) {
        const struct emu_gpu *gpu = &cuda.state->gpus[cuda.gpus[cuda.ordinals[ordinal]].minor];

        if (gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == number) {
            *device = (CUdevice)ordinal;
            rc = CUDA_SUCCESS;
        }
    }
    leave();
    return rc;
}

CUDA_EXPORT(cuDeviceComputeCapability, int *major, int *minor, CUdevice device)
{
    const struct emu_gpu *gpu;
    CUresult rc = begin(device, major == NULL ? NULL : minor, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    *major = gpu->cc_major;
    *minor = gpu->cc_minor;
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuDeviceCanAccessPeer, int *can, CUdevice device, CUdevice peer)
{
    const struct emu_gpu *gpu;
    CUresult rc = begin(device, can, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    *can = device != peer;
    leave();
    return CUDA_SUCCESS;
}

struct attribute {
    int id, value;
};

/* Attributes with the same value on all models. */
static const struct attribute attributes[] = {
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, /* block and grid */
    {8, 49152}, {9, 65536}, {10, 32}, {11, 2147483647}, {12, 65536}, {14, 512},        /* shared, constant, warp, pitch, registers */
    {15, 1}, {19, 1}, {31, 1}, {38, 41943040}, {39, 2048}, {40, 3}, {41, 1},           /* overlap, mapping, concurrency, L2, UVA */
    {78, 1}, {79, 1}, {80, 1}, {81, 167936}, {82, 65536}, {83, 1}, {95, 1}, {97, 166912}, {106, 32},
};

#define ATTRIBUTE_LAST 150

static int attribute_value(const struct emu_gpu *gpu, int id)
{
    switch (id) {
    case 13:
        return (int)gpu->sm_clock_mhz * 1000;
    case 16:
        return gpu->multiprocessors;
    case 33:
        return (int)gpu->pci_bus;
    case 34:
        return (int)gpu->pci_device;
    case 36:
        return (int)gpu->mem_clock_mhz * 1000;
    case 37:
        return (int)gpu->bus_width;
    case 50:
        return (int)gpu->pci_domain;
    case 75:
        return gpu->cc_major;
    case 76:
        return gpu->cc_minor;
    default:
        for (size_t at = 0; at < sizeof(attributes) / sizeof(attributes[0]); at++)
            if (attributes[at].id == id)
                return attributes[at].value;
        return 0;
    }
}

CUDA_EXPORT(cuDeviceGetAttribute, int *value, int attribute, CUdevice device)
{
    const struct emu_gpu *gpu;
    CUresult rc = attribute <= 0 || attribute > ATTRIBUTE_LAST ? CUDA_ERROR_INVALID_VALUE : begin(device, value, &gpu);

    if (rc != CUDA_SUCCESS)
        return rc;
    *value = attribute_value(gpu, attribute);
    leave();
    return CUDA_SUCCESS;
}
