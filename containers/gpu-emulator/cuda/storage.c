/* Custom storage: device memory of another process is mapped here; the caller copies it and completes the operation.
 *
 * The memory file of the other process and its table of allocations are opened through /proc/PID/fd. All memory on one GPU
 * appears as one address range here. The stream is the default stream: copies are synchronous.
 */
#include "internal.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct window {
    CUdeviceptr at;
    size_t size;
    unsigned minor;
};

struct CUIcheckpointOperation_st {
    CUcheckpointOperationHandle next;
    pid_t pid;
    int fd;
    struct vram_entry *entries;
    size_t entry_count;
    struct window windows[EMU_MAX_GPUS];
    CUcheckpointCustomStoragePerDeviceData devices[EMU_MAX_GPUS];
    CUcheckpointCustomStorageInfo info;
};

static CUcheckpointOperationHandle operations; /* cuda.mutex */

static int open_by_name(pid_t pid, const char *name)
{
    char directory[64], path[384], link[256];
    struct dirent *entry;
    int found = -1;
    DIR *dir;

    snprintf(directory, sizeof(directory), "/proc/%d/fd", (int)pid);
    dir = opendir(directory);
    if (dir == NULL)
        return -1;
    while (found < 0 && (entry = readdir(dir)) != NULL) {
        ssize_t length;

        snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name);
        length = readlink(path, link, sizeof(link) - 1);
        if (length <= 0)
            continue;
        link[length] = '\0';
        if (strstr(link, name) != NULL)
            found = open(path, O_RDWR | O_CLOEXEC);
    }
    closedir(dir);
    return found;
}

static CUresult read_table(CUcheckpointOperationHandle operation)
{
    int fd = open_by_name(operation->pid, VRAM_TABLE_NAME);
    off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    bool whole;

    if (size < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    operation->entries = malloc((size_t)size + 1);
    operation->entry_count = (size_t)size / sizeof(struct vram_entry);
    whole = operation->entries != NULL && pread(fd, operation->entries, (size_t)size, 0) == size;
    close(fd);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUcontext primary_on(unsigned minor)
{
    for (CUcontext at = cuda.contexts; at != NULL; at = at->next)
        if (at->primary && at->active && gpu_of((CUdevice)at->ordinal)->minor == minor)
            return at;
    return NULL;
}

/* The caller must have a primary context on each GPU that the process uses. */
CUresult storage_possible(struct emu_state *state, pid_t pid)
{
    CUresult rc = CUDA_SUCCESS;
    int slot;

    if (!cuda.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (pid == getpid())
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&cuda.mutex);
    emu_lock(state);
    slot = emu_slot_of_pid(state, pid);
    for (unsigned minor = 0; slot >= 0 && minor < state->gpu_count; minor++)
        if (state->procs[slot].gpu[minor].bytes > 0 && primary_on(minor) == NULL)
            rc = CUDA_ERROR_INVALID_CONTEXT;
    emu_unlock(state);
    pthread_mutex_unlock(&cuda.mutex);
    return rc;
}

static struct window *window_of(CUcheckpointOperationHandle operation, unsigned minor)
{
    for (unsigned at = 0; at < operation->info.deviceCount; at++)
        if (operation->windows[at].minor == minor)
            return &operation->windows[at];
    operation->windows[operation->info.deviceCount] = (struct window){.minor = minor};
    return &operation->windows[operation->info.deviceCount++];
}

static CUresult place(CUcheckpointOperationHandle operation)
{
    static unsigned next;

    for (size_t at = 0; at < operation->entry_count; at++)
        window_of(operation, operation->entries[at].minor)->size += operation->entries[at].size;
    for (unsigned at = 0; at < operation->info.deviceCount; at++) {
        struct window *window = &operation->windows[at];
        CUcontext context = primary_on(window->minor);

        if (context == NULL)
            return CUDA_ERROR_INVALID_CONTEXT;
        window->at = WINDOW_BASE + (next++ % EMU_MAX_GPUS) * WINDOW_STRIDE;
        if (memory_window(context, window->at, window->size) != CUDA_SUCCESS)
            return CUDA_ERROR_OUT_OF_MEMORY;
        operation->devices[at] = (CUcheckpointCustomStoragePerDeviceData){.devPtr = window->at, .size = window->size};
    }
    return CUDA_SUCCESS;
}

static void drop(CUcheckpointOperationHandle operation)
{
    for (unsigned at = 0; at < operation->info.deviceCount; at++)
        memory_unwindow(operation->windows[at].at);
    if (operation->fd >= 0)
        close(operation->fd);
    free(operation->entries);
    free(operation);
}

CUresult storage_begin(pid_t pid, CUcheckpointCustomStorageInfo **out)
{
    CUcheckpointOperationHandle operation = calloc(1, sizeof(*operation));
    CUresult rc;

    if (operation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    operation->pid = pid;
    operation->fd = open_by_name(pid, VRAM_NAME);
    operation->info.handle = operation;
    operation->info.perDeviceData = operation->devices;
    rc = operation->fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : read_table(operation);
    pthread_mutex_lock(&cuda.mutex);
    if (rc == CUDA_SUCCESS)
        rc = place(operation);
    if (rc == CUDA_SUCCESS) {
        operation->next = operations;
        operations = operation;
        *out = &operation->info;
    } else {
        drop(operation);
    }
    pthread_mutex_unlock(&cuda.mutex);
    return rc;
}

static bool transfer_all(int fd, char *data, size_t size, off_t offset, bool write)
{
    while (size > 0) {
        ssize_t done = write ? pwrite(fd, data, size, offset) : pread(fd, data, size, offset);

        if (done < 0 || (write && done == 0))
            return false;
        if (done == 0) { /* beyond the written part */
            memset(data, 0, size);
            return true;
        }
        data += done;
        offset += done;
        size -= (size_t)done;
    }
    return true;
}

/* The window of a GPU contains its allocations one after another. cuda.mutex held. */
static CUresult copy_within(CUcheckpointOperationHandle operation, const struct window *window, size_t from, char *data, size_t size,
                            bool write)
{
    size_t begin = 0;

    for (size_t at = 0; at < operation->entry_count && size > 0; at++) {
        const struct vram_entry *entry = &operation->entries[at];

        if (entry->minor != window->minor)
            continue;
        if (from < begin + entry->size) {
            size_t skip = from - begin, now = entry->size - skip < size ? entry->size - skip : size;

            if (!transfer_all(operation->fd, data, now, (off_t)(entry->at - VRAM_BASE + skip), write))
                return CUDA_ERROR_OPERATING_SYSTEM;
            data += now;
            from += now;
            size -= now;
        }
        begin += entry->size;
    }
    return size == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult window_copy(CUdeviceptr at, void *data, size_t size, bool write)
{
    for (CUcheckpointOperationHandle operation = operations; operation != NULL; operation = operation->next)
        for (unsigned number = 0; number < operation->info.deviceCount; number++) {
            const struct window *window = &operation->windows[number];

            if (at >= window->at && at - window->at < window->size)
                return copy_within(operation, window, at - window->at, data, size, write);
        }
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

CUDA_EXPORT(cuCheckpointOperationComplete, CUcheckpointOperationHandle handle)
{
    CUcheckpointOperationHandle *link = &operations;
    pid_t pid = 0;

    if (!cuda.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&cuda.mutex);
    while (*link != NULL && *link != handle)
        link = &(*link)->next;
    if (*link != NULL) {
        pid = handle->pid;
        *link = handle->next;
        drop(handle);
    }
    pthread_mutex_unlock(&cuda.mutex);
    return pid == 0 ? CUDA_ERROR_INVALID_VALUE : storage_complete(pid);
}
