#include "internal.h"

#include <string.h>

#define BOUNCE 65536

/* An address within an allocation is on the device, others are on the host. Managed memory is host memory. */
static bool on_device(CUdeviceptr at)
{
    const struct allocation *found = allocation_at(at);

    return found != NULL && !found->managed;
}

static bool in_vram(CUdeviceptr at)
{
    return at >= VRAM_BASE && at < VRAM_END;
}

static CUresult device_to_device(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    char block[BOUNCE];
    CUresult rc = CUDA_SUCCESS;

    while (size > 0 && rc == CUDA_SUCCESS) {
        size_t now = size < sizeof(block) ? size : sizeof(block);

        rc = vram_read(from, block, now);
        if (rc == CUDA_SUCCESS)
            rc = vram_write(to, block, now);
        from += now;
        to += now;
        size -= now;
    }
    return rc;
}

static void *host(CUdeviceptr at)
{
    return (void *)(uintptr_t)at;
}

/* cuda.mutex held. */
static CUresult move(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    bool to_device = on_device(to), from_device = on_device(from);

    if (size == 0)
        return CUDA_SUCCESS;
    if ((to_device && !is_device_range(to, size)) || (from_device && !is_device_range(from, size)))
        return CUDA_ERROR_INVALID_VALUE;
    if (to_device && from_device)
        return device_to_device(to, from, size);
    if (to_device)
        return vram_write(to, host(from), size);
    if (from_device)
        return vram_read(from, host(to), size);
    memmove(host(to), host(from), size);
    return CUDA_SUCCESS;
}

enum ends { ANY, TO_DEVICE = 1, FROM_DEVICE = 2, BOTH = 3 };

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t size, enum ends ends, bool wait, CUstream stream)
{
    CUcontext context;
    uint64_t *tail, end_ns = 0;
    CUresult rc = enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    rc = stream_of(context, stream, &tail);
    if (rc == CUDA_SUCCESS)
        end_ns = *tail;
    pthread_mutex_unlock(&cuda.mutex);
    if (rc == CUDA_SUCCESS && wait)
        rc = wait_until(context, end_ns);
    pthread_mutex_lock(&cuda.mutex);
    if (rc == CUDA_SUCCESS && size > 0 &&
        ((ends & TO_DEVICE && !is_device_range(to, size)) || (ends & FROM_DEVICE && !is_device_range(from, size))))
        rc = CUDA_ERROR_INVALID_VALUE;
    /* An unallocated address in the range of the device is not a host address either. */
    if (rc == CUDA_SUCCESS && ((in_vram(to) && !on_device(to)) || (in_vram(from) && !on_device(from))))
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS && (to == 0 || from == 0) && size > 0)
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS)
        rc = move(to, from, size);
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

static CUdeviceptr address(const void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

CUDA_EXPORT(cuMemcpy, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(to, from, size, ANY, true, NULL);
}

CUDA_EXPORT(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(to, from, size, ANY, false, stream);
}

CUDA_EXPORT(cuMemcpyHtoD_v2, CUdeviceptr to, const void *from, size_t size)
{
    return copy(to, address(from), size, TO_DEVICE, true, NULL);
}

CUDA_EXPORT(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    return copy(to, address(from), size, TO_DEVICE, false, stream);
}

CUDA_EXPORT(cuMemcpyDtoH_v2, void *to, CUdeviceptr from, size_t size)
{
    return copy(address(to), from, size, FROM_DEVICE, true, NULL);
}

CUDA_EXPORT(cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(address(to), from, size, FROM_DEVICE, false, stream);
}

CUDA_EXPORT(cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(to, from, size, BOTH, true, NULL);
}

CUDA_EXPORT(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(to, from, size, BOTH, false, stream);
}

static CUresult fill(CUdeviceptr at, unsigned value, size_t width, size_t count, CUstream stream)
{
    CUcontext context;
    uint64_t *tail;
    CUresult rc = enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    rc = stream_of(context, stream, &tail);
    if (rc == CUDA_SUCCESS && (at % width != 0 || count > VRAM_END || (count > 0 && !is_device_range(at, count * width))))
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS && count > 0 && on_device(at))
        rc = vram_fill(at, &value, width, count); /* little endian: the low bytes of the value come first */
    else if (rc == CUDA_SUCCESS)
        for (size_t done = 0; done < count; done++)
            memcpy((char *)host(at) + done * width, &value, width);
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

CUDA_EXPORT(cuMemsetD8_v2, CUdeviceptr at, unsigned char value, size_t count)
{
    return fill(at, value, 1, count, NULL);
}

CUDA_EXPORT(cuMemsetD16_v2, CUdeviceptr at, unsigned short value, size_t count)
{
    return fill(at, value, 2, count, NULL);
}

CUDA_EXPORT(cuMemsetD32_v2, CUdeviceptr at, unsigned value, size_t count)
{
    return fill(at, value, 4, count, NULL);
}

CUDA_EXPORT(cuMemsetD8Async, CUdeviceptr at, unsigned char value, size_t count, CUstream stream)
{
    return fill(at, value, 1, count, stream);
}

CUDA_EXPORT(cuMemsetD16Async, CUdeviceptr at, unsigned short value, size_t count, CUstream stream)
{
    return fill(at, value, 2, count, stream);
}

CUDA_EXPORT(cuMemsetD32Async, CUdeviceptr at, unsigned value, size_t count, CUstream stream)
{
    return fill(at, value, 4, count, stream);
}
