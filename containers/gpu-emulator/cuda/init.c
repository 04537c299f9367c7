#include "internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

struct cuda cuda = {.mutex = PTHREAD_MUTEX_INITIALIZER, .next_address = VRAM_BASE};

/* CUDA cannot be used in a child of fork(), as with the real driver. */
static void reset_in_child(void)
{
    cuda.forked = cuda.initialized;
    cuda.state = NULL;
    forget_devices();
    vram_close();
    vram_table_close();
}

__attribute__((constructor)) static void register_fork_handler(void)
{
    pthread_atfork(NULL, NULL, reset_in_child);
}

/* An index, or an unambiguous prefix of a UUID. */
static int gpu_named(const char *name)
{
    size_t length = strlen(name);
    int found = -1;
    char *end;
    long index = strtol(name, &end, 10);

    if (isdigit((unsigned char)*name) && *end == '\0')
        return index < (long)cuda.gpu_count ? (int)index : -1;
    if (strncmp(name, "GPU-", 4) != 0)
        return -1;
    for (unsigned gpu = 0; gpu < cuda.gpu_count; gpu++) {
        char text[41];

        emu_uuid_text(cuda.gpus[gpu].uuid, text);
        if (strncasecmp(text, name, length) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = (int)gpu;
    }
    return found;
}

static bool listed(int gpu)
{
    for (unsigned ordinal = 0; ordinal < cuda.ordinal_count; ordinal++)
        if (cuda.ordinals[ordinal] == (unsigned)gpu)
            return true;
    return false;
}

/* CUDA_VISIBLE_DEVICES: the first name without a GPU ends the list; a GPU named twice hides all. */
static void choose_ordinals(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char list[1024], *rest = list, *name;

    cuda.ordinal_count = 0;
    if (visible == NULL) {
        for (unsigned gpu = 0; gpu < cuda.gpu_count; gpu++)
            cuda.ordinals[cuda.ordinal_count++] = gpu;
        return;
    }
    strncpy(list, visible, sizeof(list) - 1);
    list[sizeof(list) - 1] = '\0';
    while ((name = strsep(&rest, ",")) != NULL && cuda.ordinal_count < EMU_MAX_GPUS) {
        int gpu;

        while (isspace((unsigned char)*name))
            name++;
        for (char *end = name + strlen(name); end > name && isspace((unsigned char)end[-1]);)
            *--end = '\0';
        gpu = gpu_named(name);
        if (gpu < 0)
            return;
        if (listed(gpu)) {
            cuda.ordinal_count = 0;
            return;
        }
        cuda.ordinals[cuda.ordinal_count++] = (unsigned)gpu;
    }
}

static void list_gpus(const struct emu_state *state)
{
    unsigned minors[EMU_MAX_GPUS], count = emu_visible(state, minors);

    cuda.gpu_count = 0;
    for (unsigned at = 0; at < count; at++) {
        const struct emu_gpu *from = &state->gpus[minors[at]];
        struct gpu *gpu = &cuda.gpus[cuda.gpu_count];

        if (from->lost)
            continue;
        *gpu = (struct gpu){.minor = minors[at]};
        memcpy(gpu->uuid, from->uuid, sizeof(gpu->uuid));
        memcpy(gpu->chip, from->chip, sizeof(gpu->chip));
        cuda.gpu_count++;
    }
    choose_ordinals();
}

static CUresult initialize(void)
{
    CUresult rc = CUDA_SUCCESS;

    cuda.state = emu_attach();
    if (cuda.state == NULL)
        return CUDA_ERROR_NO_DEVICE;
    list_gpus(cuda.state);
    if (cuda.ordinal_count == 0) {
        rc = CUDA_ERROR_NO_DEVICE;
    } else {
        emu_lock(cuda.state);
        if (emu_slot_open(cuda.state) < 0)
            rc = CUDA_ERROR_OPERATING_SYSTEM;
        emu_unlock(cuda.state);
    }
    if (rc == CUDA_SUCCESS && vram_open() < 0)
        rc = CUDA_ERROR_OPERATING_SYSTEM;
    if (rc == CUDA_SUCCESS) {
        hold_devices();
        rc = restore_thread_start();
    }
    if (rc == CUDA_SUCCESS)
        return rc;
    emu_lock(cuda.state);
    emu_slot_close(cuda.state);
    emu_unlock(cuda.state);
    release_devices();
    vram_close();
    emu_detach();
    cuda.state = NULL;
    return rc;
}

CUDA_EXPORT(cuInit, unsigned flags)
{
    CUresult rc = CUDA_SUCCESS;

    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (cuda.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&cuda.mutex);
    if (!cuda.initialized) {
        rc = initialize();
        cuda.initialized = rc == CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&cuda.mutex);
    return rc;
}

/* Needs no cuInit(). Without a driver there is no version. */
CUDA_EXPORT(cuDriverGetVersion, int *version)
{
    struct emu_state *state;

    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    state = emu_attach();
    *version = state == NULL ? 0 : state->cuda_version;
    if (state != NULL)
        emu_detach();
    return CUDA_SUCCESS;
}
