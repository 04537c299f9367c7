/* Contents of device memory.
 *
 * They are in a memory file that is not mapped, so that they do not count as resident memory of the process, as with a real
 * GPU; the file belongs to the process and ends with it. While the process is checkpointed, they are in ordinary private
 * memory of the process and the file is closed. Memory that was never written takes no space, neither here nor in an image.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK (8UL * 1024UL * 1024UL)

static int vram_fd = -1, table_fd = -1;

int vram_open(void)
{
    if (vram_fd < 0)
        vram_fd = memfd_create(VRAM_NAME, MFD_CLOEXEC);
    return vram_fd;
}

void vram_close(void)
{
    if (vram_fd >= 0)
        close(vram_fd);
    vram_fd = -1;
}

/* The position of each allocation in the file. */
int vram_table_open(void)
{
    vram_table_close();
    table_fd = memfd_create(VRAM_TABLE_NAME, MFD_CLOEXEC);
    for (size_t at = 0; table_fd >= 0 && at < cuda.allocation_count; at++) {
        const struct allocation *one = &cuda.allocations[at];
        struct vram_entry entry = {.at = one->at, .size = one->size, .minor = cuda.gpus[one->gpu].minor};

        if (one->at < VRAM_END && write(table_fd, &entry, sizeof(entry)) != (ssize_t)sizeof(entry))
            vram_table_close();
    }
    return table_fd;
}

void vram_table_close(void)
{
    if (table_fd >= 0)
        close(table_fd);
    table_fd = -1;
}

static off_t offset_of(CUdeviceptr at)
{
    return (off_t)(at - VRAM_BASE);
}

CUresult vram_write(CUdeviceptr at, const void *from, size_t size)
{
    const char *next = from;

    if (at >= WINDOW_BASE)
        return window_copy(at, (void *)(uintptr_t)from, size, true);
    while (size > 0) {
        ssize_t done = pwrite(vram_fd, next, size, offset_of(at));

        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return CUDA_ERROR_OPERATING_SYSTEM;
        next += done;
        at += (size_t)done;
        size -= (size_t)done;
    }
    return CUDA_SUCCESS;
}

CUresult vram_read(CUdeviceptr at, void *to, size_t size)
{
    char *next = to;

    if (at >= WINDOW_BASE)
        return window_copy(at, to, size, false);
    while (size > 0) {
        ssize_t done = pread(vram_fd, next, size, offset_of(at));

        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return CUDA_ERROR_OPERATING_SYSTEM;
        if (done == 0) { /* beyond the written part */
            memset(next, 0, size);
            break;
        }
        next += done;
        at += (size_t)done;
        size -= (size_t)done;
    }
    return CUDA_SUCCESS;
}

CUresult vram_fill(CUdeviceptr at, const void *pattern, size_t width, size_t count)
{
    char block[65536];
    size_t per_block = sizeof(block) / width;
    CUresult rc = CUDA_SUCCESS;

    for (size_t done = 0; done < per_block && done < count; done++)
        memcpy(block + done * width, pattern, width);
    while (count > 0 && rc == CUDA_SUCCESS) {
        size_t now = count < per_block ? count : per_block;

        rc = vram_write(at, block, now * width);
        at += now * width;
        count -= now;
    }
    return rc;
}

void vram_discard(CUdeviceptr at, size_t size)
{
    if (vram_fd >= 0 && size > 0)
        (void)!fallocate(vram_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_of(at), (off_t)size);
}

static size_t page_up(size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return (size + page - 1) / page * page;
}

/* Moves the contents into the memory of the process piece by piece, so that the host never holds them twice. */
CUresult vram_stage(struct allocation *allocation)
{
    off_t begin = offset_of(allocation->at), end = begin + (off_t)allocation->size;
    char *staged = mmap(NULL, page_up(allocation->size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (staged == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    allocation->staged = staged;
    for (off_t data = lseek(vram_fd, begin, SEEK_DATA); data >= 0 && data < end;) {
        off_t hole = lseek(vram_fd, data, SEEK_HOLE);

        if (hole < 0 || hole > end)
            hole = end;
        while (data < hole) {
            size_t now = (size_t)(hole - data) < CHUNK ? (size_t)(hole - data) : CHUNK;
            CUdeviceptr at = VRAM_BASE + (CUdeviceptr)data;
            CUresult rc = vram_read(at, staged + (data - begin), now);

            if (rc != CUDA_SUCCESS)
                return rc;
            vram_discard(at, now);
            data += (off_t)now;
        }
        data = lseek(vram_fd, hole, SEEK_DATA);
    }
    return CUDA_SUCCESS;
}

/* Returns the number of pages from `from` on that all have contents, or all have none. /proc/self/pagemap: bit 63 present,
 * 62 swapped out. */
static size_t count_pages_alike(int pagemap, const char *from, size_t pages, size_t page, bool *filled)
{
    uint64_t entries[512];
    size_t want = pages < 512 ? pages : 512;
    ssize_t got = pagemap < 0 ? -1 : pread(pagemap, entries, want * sizeof(entries[0]),
                                           (off_t)((uintptr_t)from / page * sizeof(entries[0])));
    size_t run = 1;

    *filled = true;
    if (got < (ssize_t)sizeof(entries[0]))
        return want;
    *filled = entries[0] >> 62 != 0;
    while (run < (size_t)got / sizeof(entries[0]) && (entries[run] >> 62 != 0) == *filled)
        run++;
    return run;
}

CUresult vram_unstage(struct allocation *allocation)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), length = page_up(allocation->size);
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    char *staged = allocation->staged;
    CUresult rc = CUDA_SUCCESS;

    for (size_t done = 0; done < length && rc == CUDA_SUCCESS;) {
        bool filled;
        size_t run = count_pages_alike(pagemap, staged + done, (length - done) / page, page, &filled) * page;

        if (filled) {
            size_t now = done + run > allocation->size ? allocation->size - done : run;

            rc = vram_write(allocation->at + done, staged + done, now);
            madvise(staged + done, run, MADV_DONTNEED);
        }
        done += run;
    }
    if (pagemap >= 0)
        close(pagemap);
    if (rc == CUDA_SUCCESS) {
        munmap(staged, length);
        allocation->staged = NULL;
    }
    return rc;
}
