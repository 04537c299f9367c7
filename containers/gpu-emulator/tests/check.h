/* A test is a program whose functions use CHECK; the first failure ends it. */
#ifndef GPU_EMULATOR_TESTS_CHECK_H
#define GPU_EMULATOR_TESTS_CHECK_H

#include "core.h"
#include "cuda_abi.h"
#include "nvml_abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                       \
    do {                                                                                                                       \
        if (!(condition)) {                                                                                                    \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                          \
            _exit(1);                                                                                                          \
        }                                                                                                                      \
    } while (0)

/* Creates a state of two GPUs in a new directory, and selects it in the environment. */
static inline void new_state(unsigned gpus, uint64_t memory_mib)
{
    static char directory[] = "/tmp/gpu-emulator-test.XXXXXX", path[64];
    struct emu_create create = {.seed = "test", .driver_version = "580.95.05", .cuda_version = 13000, .gpu_count = gpus,
                                .memory_mib = memory_mib, .context_mib = 100, .sample_period_ms = 1000, .persistence = true};

    if (path[0] == '\0') {
        CHECK(mkdtemp(directory) != NULL);
        snprintf(path, sizeof(path), "%s/state", directory);
        setenv("GPU_EMULATOR_STATE", path, 1);
    }
    for (unsigned gpu = 0; gpu < gpus; gpu++)
        create.models[gpu] = emu_model_find("a100-80g");
    create.path = path;
    CHECK(emu_create(&create) == 0);
}

static inline void drop_state(void)
{
    char path[128], *slash;

    unlink(emu_state_path());
    snprintf(path, sizeof(path), "%s.lock", emu_state_path());
    unlink(path);
    slash = strrchr(path, '/');
    *slash = '\0';
    rmdir(path);
}

#endif
