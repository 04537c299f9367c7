#include "core.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* As with the real driver, a GPU is not visible if its device node exists but may not be opened (device cgroup, file
 * permissions). A missing node means that this host has no device nodes: the GPU is visible. */
static bool may_open(unsigned minor)
{
    char path[32];
    int fd;

    snprintf(path, sizeof(path), "/dev/nvidia%u", minor);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        close(fd);
        return true;
    }
    return errno != EPERM && errno != EACCES;
}

unsigned emu_visible(const struct emu_state *state, unsigned out[EMU_MAX_GPUS])
{
    unsigned count = 0;

    for (unsigned gpu = 0; gpu < state->gpu_count; gpu++)
        if (may_open(gpu))
            out[count++] = gpu;
    return count;
}

int emu_find_uuid(const struct emu_state *state, const uint8_t uuid[16])
{
    for (unsigned gpu = 0; gpu < state->gpu_count; gpu++)
        if (memcmp(state->gpus[gpu].uuid, uuid, 16) == 0)
            return (int)gpu;
    return -1;
}

void emu_uuid_text(const uint8_t uuid[16], char out[41])
{
    char *end = out + sprintf(out, "GPU-");

    for (int byte = 0; byte < 16; byte++)
        end += sprintf(end, byte == 4 || byte == 6 || byte == 8 || byte == 10 ? "-%02x" : "%02x", uuid[byte]);
}

bool emu_uuid_parse(const char *text, uint8_t uuid[16])
{
    static const char digits[] = "0123456789abcdef";
    int nibble = 0;

    if (strncmp(text, "GPU-", 4) == 0)
        text += 4;
    for (; *text != '\0'; text++) {
        const char *digit = strchr(digits, tolower((unsigned char)*text));

        if (*text == '-')
            continue;
        if (digit == NULL || nibble == 32)
            return false;
        uuid[nibble / 2] = (uint8_t)(nibble % 2 == 0 ? (digit - digits) << 4 : uuid[nibble / 2] | (digit - digits));
        nibble++;
    }
    return nibble == 32;
}

void emu_bus_id(const struct emu_gpu *gpu, char out[32])
{
    snprintf(out, 32, "%08X:%02X:%02X.0", gpu->pci_domain, gpu->pci_bus & 0xff, gpu->pci_device & 0xff);
}
