#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALLEST 512ULL

/* Returns the last allocation that begins at or below the address. */
static struct allocation *below(CUdeviceptr at)
{
    size_t low = 0, high = cuda.allocation_count;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (cuda.allocations[middle].at <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low == 0 ? NULL : &cuda.allocations[low - 1];
}

struct allocation *allocation_at(CUdeviceptr at)
{
    struct allocation *found = below(at);

    return found != NULL && at - found->at < found->size ? found : NULL;
}

bool is_device_range(CUdeviceptr at, size_t size)
{
    const struct allocation *found = allocation_at(at);

    return found != NULL && size <= found->size - (at - found->at);
}

static size_t rounded(size_t size)
{
    return (size + SMALLEST - 1) / SMALLEST * SMALLEST;
}

/* Adds `bytes` (or removes them, if negative) to the memory in use, if the GPU has enough. */
static CUresult account(struct gpu *gpu, int64_t bytes)
{
    struct emu_proc *proc = &cuda.state->procs[emu_slot_own()];
    CUresult rc = CUDA_SUCCESS;

    emu_lock(cuda.state);
    if (bytes > 0) {
        uint64_t room, before = emu_proc_bytes(cuda.state, proc, gpu->minor), after;

        emu_sweep(cuda.state);
        room = emu_free_bytes(cuda.state, gpu->minor);
        proc->gpu[gpu->minor].bytes += (uint64_t)bytes;
        after = emu_proc_bytes(cuda.state, proc, gpu->minor);
        proc->gpu[gpu->minor].bytes -= (uint64_t)bytes;
        if (after - before > room)
            rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (rc == CUDA_SUCCESS) {
        gpu->bytes += (uint64_t)bytes;
        proc->gpu[gpu->minor].bytes = gpu->bytes;
    }
    emu_unlock(cuda.state);
    return rc;
}

static CUresult insert(const struct allocation *allocation)
{
    size_t place = cuda.allocation_count;

    if (cuda.allocation_count == cuda.allocation_room) {
        size_t room = cuda.allocation_room == 0 ? 256 : cuda.allocation_room * 2;
        struct allocation *more = realloc(cuda.allocations, room * sizeof(*more));

        if (more == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        cuda.allocations = more;
        cuda.allocation_room = room;
    }
    while (place > 0 && cuda.allocations[place - 1].at > allocation->at)
        place--;
    memmove(&cuda.allocations[place + 1], &cuda.allocations[place],
            (cuda.allocation_count - place) * sizeof(*cuda.allocations));
    cuda.allocations[place] = *allocation;
    cuda.allocation_count++;
    return CUDA_SUCCESS;
}

static CUresult place_managed(struct allocation *allocation)
{
    void *host = mmap(NULL, allocation->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    allocation->at = (CUdeviceptr)(uintptr_t)host;
    return host == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* Addresses increase; large allocations begin at block boundaries. Freed addresses at the end are reused. */
static CUresult place_on_device(struct allocation *allocation)
{
    uint64_t align = allocation->size >= EMU_BLOCK / 2 ? EMU_BLOCK : SMALLEST;
    CUdeviceptr at = (cuda.next_address + align - 1) / align * align;

    if (at + allocation->size > VRAM_END)
        return CUDA_ERROR_OUT_OF_MEMORY;
    allocation->at = at;
    cuda.next_address = at + allocation->size;
    return CUDA_SUCCESS;
}

CUresult memory_allocate(CUcontext context, size_t size, bool managed, CUdeviceptr *out)
{
    struct gpu *gpu = gpu_of((CUdevice)context->ordinal);
    struct allocation allocation = {.size = rounded(size), .context = context, .gpu = cuda.ordinals[context->ordinal],
                                    .managed = managed};
    CUresult rc;

    if (size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > VRAM_END)
        return CUDA_ERROR_OUT_OF_MEMORY;
    rc = account(gpu, (int64_t)allocation.size);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = managed ? place_managed(&allocation) : place_on_device(&allocation);
    if (rc == CUDA_SUCCESS)
        rc = insert(&allocation);
    if (rc != CUDA_SUCCESS)
        account(gpu, -(int64_t)allocation.size);
    else
        *out = allocation.at;
    return rc;
}

/* Memory of another process, which accounts for it. Managed memory is above these addresses. */
static bool is_window(const struct allocation *allocation)
{
    return !allocation->managed && allocation->at >= WINDOW_BASE;
}

static void remove_allocation(struct allocation *allocation)
{
    size_t place = (size_t)(allocation - cuda.allocations);

    if (allocation->managed)
        munmap((void *)(uintptr_t)allocation->at, allocation->size);
    else if (!is_window(allocation))
        vram_discard(allocation->at, allocation->size);
    if (!is_window(allocation))
        account(&cuda.gpus[allocation->gpu], -(int64_t)allocation->size);
    cuda.allocation_count--;
    memmove(allocation, allocation + 1, (cuda.allocation_count - place) * sizeof(*allocation));
    cuda.next_address = VRAM_BASE;
    for (size_t at = cuda.allocation_count; at > 0; at--) {
        const struct allocation *last = &cuda.allocations[at - 1];

        if (!last->managed && !is_window(last)) {
            cuda.next_address = last->at + last->size;
            break;
        }
    }
}

CUresult memory_free(CUdeviceptr at)
{
    struct allocation *found = allocation_at(at);

    if (found == NULL || found->at != at)
        return CUDA_ERROR_INVALID_VALUE;
    remove_allocation(found);
    return CUDA_SUCCESS;
}

CUresult memory_window(CUcontext context, CUdeviceptr at, size_t size)
{
    struct allocation allocation = {.at = at, .size = size, .context = context, .gpu = cuda.ordinals[context->ordinal]};

    return insert(&allocation);
}

void memory_unwindow(CUdeviceptr at)
{
    struct allocation *found = allocation_at(at);

    if (found != NULL && is_window(found))
        remove_allocation(found);
}

void memory_drop(CUcontext context)
{
    for (size_t at = cuda.allocation_count; at > 0; at--)
        if (cuda.allocations[at - 1].context == context)
            remove_allocation(&cuda.allocations[at - 1]);
}

static CUresult allocate(CUdeviceptr *out, size_t size, bool managed)
{
    CUcontext context;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    rc = memory_allocate(context, size, managed, out);
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

CUDA_EXPORT(cuMemAlloc_v2, CUdeviceptr *out, size_t size)
{
    return allocate(out, size, false);
}

CUDA_EXPORT(cuMemAllocAsync, CUdeviceptr *out, size_t size, CUstream stream)
{
    (void)stream;
    return allocate(out, size, false);
}

CUDA_EXPORT(cuMemAllocManaged, CUdeviceptr *out, size_t size, unsigned flags)
{
    (void)flags;
    return allocate(out, size, true);
}

CUDA_EXPORT(cuMemAllocPitch_v2, CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    (void)element;
    if (pitch == NULL || width == 0 || height == 0)
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = rounded(width);
    return allocate(out, *pitch * height, false);
}

CUDA_EXPORT(cuMemFree_v2, CUdeviceptr at)
{
    CUcontext context;
    CUresult rc = enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (at != 0)
        wait_until(context, context->end_ns); /* freeing waits for kernels that may use the memory */
    pthread_mutex_lock(&cuda.mutex);
    rc = at == 0 ? CUDA_SUCCESS : memory_free(at);
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

CUDA_EXPORT(cuMemFreeAsync, CUdeviceptr at, CUstream stream)
{
    (void)stream;
    return cuMemFree_v2(at);
}

CUDA_EXPORT(cuMemGetInfo_v2, size_t *free_bytes, size_t *total_bytes)
{
    CUcontext context;
    CUresult rc = free_bytes == NULL || total_bytes == NULL ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);
    unsigned minor;

    if (rc != CUDA_SUCCESS)
        return rc;
    minor = gpu_of((CUdevice)context->ordinal)->minor;
    emu_lock(cuda.state);
    emu_sweep(cuda.state);
    *free_bytes = emu_free_bytes(cuda.state, minor);
    *total_bytes = cuda.state->gpus[minor].total_bytes - cuda.state->gpus[minor].reserved_bytes;
    emu_unlock(cuda.state);
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuMemGetAddressRange_v2, CUdeviceptr *base, size_t *size, CUdeviceptr at)
{
    const struct allocation *found;
    CUcontext context;
    CUresult rc = enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    found = allocation_at(at);
    if (found == NULL)
        rc = CUDA_ERROR_NOT_FOUND;
    if (found != NULL && base != NULL)
        *base = found->at;
    if (found != NULL && size != NULL)
        *size = found->size;
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

/* Page-locked host memory is ordinary memory here, and part of the image. */
CUDA_EXPORT(cuMemHostAlloc, void **out, size_t size, unsigned flags)
{
    CUcontext context;
    CUresult rc = out == NULL || size == 0 ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    (void)flags;
    if (rc != CUDA_SUCCESS)
        return rc;
    *out = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    leave();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUDA_EXPORT(cuMemAllocHost_v2, void **out, size_t size)
{
    return cuMemHostAlloc(out, size, 0);
}

CUDA_EXPORT(cuMemFreeHost, void *host)
{
    CUcontext context;
    CUresult rc = enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    free(host);
    leave();
    return CUDA_SUCCESS;
}

/* Nothing is locked: copies accept any host memory. */
CUDA_EXPORT(cuMemHostRegister_v2, void *host, size_t size, unsigned flags)
{
    CUcontext context;
    CUresult rc = host == NULL || size == 0 ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    (void)flags;
    if (rc == CUDA_SUCCESS)
        leave();
    return rc;
}

CUDA_EXPORT(cuMemHostUnregister, void *host)
{
    return cuMemHostRegister_v2(host, 1, 0);
}
