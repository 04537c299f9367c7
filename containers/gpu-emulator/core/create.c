#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* FNV-1a, to derive identities from a seed: a node gets the same GPUs each time it is initialized. */
static uint64_t hash(const char *seed, unsigned gpu, unsigned part)
{
    uint64_t sum = 14695981039346656037ULL;

    for (const char *c = seed; *c != '\0'; c++)
        sum = (sum ^ (unsigned char)*c) * 1099511628211ULL;
    sum = (sum ^ gpu) * 1099511628211ULL;
    sum = (sum ^ (part + 0x100)) * 1099511628211ULL;
    sum ^= sum >> 29;
    sum *= 0xbf58476d1ce4e5b9ULL;
    return sum ^ (sum >> 32);
}

static void fill_gpu(struct emu_gpu *gpu, unsigned index, const struct emu_create *config)
{
    const struct emu_model *model = config->models[index];
    uint64_t high = hash(config->seed, index, 0), low = hash(config->seed, index, 1);

    snprintf(gpu->name, sizeof(gpu->name), "%s", model->name);
    snprintf(gpu->chip, sizeof(gpu->chip), "%s", model->chip);
    snprintf(gpu->serial, sizeof(gpu->serial), "165%010llu", (unsigned long long)(high % 10000000000ULL));
    memcpy(gpu->uuid, &high, sizeof(high));
    memcpy(gpu->uuid + 8, &low, sizeof(low));
    gpu->uuid[6] = (uint8_t)((gpu->uuid[6] & 0x0f) | 0x40); /* a version 4 UUID, as real GPUs have */
    gpu->uuid[8] = (uint8_t)((gpu->uuid[8] & 0x3f) | 0x80);
    gpu->pci_bus = 0x07 + 0x08 * index;
    gpu->pci_device_id = model->device_id;
    gpu->pci_subsystem_id = model->subsystem_id;
    gpu->reserved_bytes = model->reserved_mib * EMU_MIB;
    gpu->total_bytes = (config->memory_mib ? config->memory_mib + model->reserved_mib : model->total_mib) * EMU_MIB;
    gpu->cc_major = model->cc_major;
    gpu->cc_minor = model->cc_minor;
    gpu->multiprocessors = model->multiprocessors;
    gpu->power_idle_mw = model->power_idle_w * 1000;
    gpu->power_limit_mw = model->power_limit_w * 1000;
    gpu->sm_clock_mhz = model->sm_clock_mhz;
    gpu->mem_clock_mhz = model->mem_clock_mhz;
    gpu->bus_width = model->bus_width;
    gpu->architecture = model->architecture;
    gpu->mig_capable = model->mig_capable;
    gpu->persistence = config->persistence;
}

static int init_mutex(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    int rc = pthread_mutexattr_init(&attributes);

    if (rc != 0)
        return rc;
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    rc = pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return rc;
}

static int fill(struct emu_state *state, const struct emu_create *config)
{
    state->layout = EMU_LAYOUT;
    state->size = sizeof(*state);
    state->gpu_count = config->gpu_count;
    state->cuda_version = config->cuda_version;
    snprintf(state->driver_version, sizeof(state->driver_version), "%s", config->driver_version);
    state->created_ns = emu_now_ns();
    state->sample_period_ns = config->sample_period_ms * 1000000ULL;
    state->context_bytes = config->context_mib * EMU_MIB;
    for (unsigned gpu = 0; gpu < config->gpu_count; gpu++)
        fill_gpu(&state->gpus[gpu], gpu, config);
    state->magic = EMU_MAGIC;
    return init_mutex(&state->mutex);
}

/* All users of the node share the state, as they share a GPU: the mode is independent of the umask. */
static int make_file(const char *path, off_t size)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);

    if (fd >= 0 && (fchmod(fd, 0666) != 0 || ftruncate(fd, size) != 0)) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

static int fill_file(const char *path, const struct emu_create *config)
{
    struct emu_state *state;
    int fd = make_file(path, sizeof(*state));
    int rc;

    if (fd < 0)
        return errno;
    state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    rc = state == MAP_FAILED ? errno : fill(state, config);
    if (state != MAP_FAILED)
        munmap(state, sizeof(*state));
    close(fd);
    return rc;
}

int emu_create(const struct emu_create *config)
{
    char path[4096], locks[4096];
    int rc, fd;

    if (config->gpu_count > EMU_MAX_GPUS || config->sample_period_ms == 0)
        return EINVAL;
    if (snprintf(path, sizeof(path), "%s.new", config->path) >= (int)sizeof(path) ||
        snprintf(locks, sizeof(locks), "%s.lock", config->path) >= (int)sizeof(locks))
        return ENAMETOOLONG;
    fd = make_file(locks, 0);
    if (fd < 0)
        return errno;
    close(fd);
    unlink(path);
    rc = fill_file(path, config);
    if (rc == 0 && rename(path, config->path) != 0)
        rc = errno;
    if (rc != 0)
        unlink(path);
    return rc;
}
