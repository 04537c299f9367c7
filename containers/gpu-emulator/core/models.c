/* GPU models. Sizes, clocks and PCI IDs are those that real GPUs report; idle power is typical. */
#include "core.h"

#include <string.h>

/* nvmlDeviceArchitecture_t */
enum { VOLTA = 5, TURING = 6, AMPERE = 7, ADA = 8, HOPPER = 9, BLACKWELL = 10 };

static const struct emu_model models[] = {
    /* key, name, chip, device ID, subsystem ID, total MiB, reserved MiB, compute capability, SMs, idle W, limit W, SM MHz,
     * memory MHz, bus width, architecture, MIG capable */
    {"a100-40g", "NVIDIA A100-SXM4-40GB", "GA100", 0x20B010DE, 0x144E10DE, 40960, 546, 8, 0, 108, 55, 400, 1410, 1215, 5120, AMPERE, 1},
    {"a100-80g", "NVIDIA A100-SXM4-80GB", "GA100", 0x20B210DE, 0x147F10DE, 81920, 619, 8, 0, 108, 60, 400, 1410, 1593, 5120, AMPERE, 1},
    {"h100-80g", "NVIDIA H100 80GB HBM3", "GH100", 0x233010DE, 0x16C110DE, 81559, 551, 9, 0, 132, 70, 700, 1980, 2619, 5120, HOPPER, 1},
    {"h200", "NVIDIA H200", "GH100", 0x233510DE, 0x18BE10DE, 143771, 607, 9, 0, 132, 75, 700, 1980, 3201, 6016, HOPPER, 1},
    {"b200", "NVIDIA B200", "GB100", 0x290110DE, 0x199910DE, 183359, 717, 10, 0, 148, 140, 1000, 1965, 3996, 7680, BLACKWELL, 1},
    {"l40s", "NVIDIA L40S", "AD102", 0x26B910DE, 0x185110DE, 46068, 602, 8, 9, 142, 33, 350, 2520, 9001, 384, ADA, 0},
    {"t4", "Tesla T4", "TU104", 0x1EB810DE, 0x12A210DE, 15360, 458, 7, 5, 40, 10, 70, 1590, 5001, 256, TURING, 0},
    {"v100-32g", "Tesla V100-SXM2-32GB", "GV100", 0x1DB510DE, 0x124910DE, 32768, 268, 7, 0, 80, 42, 300, 1530, 877, 4096, VOLTA, 0},
};

const struct emu_model *emu_model_at(size_t index)
{
    return index < sizeof(models) / sizeof(models[0]) ? &models[index] : NULL;
}

const struct emu_model *emu_model_find(const char *key)
{
    for (size_t index = 0; index < sizeof(models) / sizeof(models[0]); index++)
        if (strcmp(models[index].key, key) == 0)
            return &models[index];
    return NULL;
}
