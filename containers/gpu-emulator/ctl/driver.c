/* The driver version of the node, which determines the features: see cuda/proc_address.c, cuda/checkpoint.c. */
#include "ctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* First driver branch -> its CUDA version. Source: CUDA release notes, table of driver versions. */
static const struct {
    long driver;
    int cuda;
} branches[] = {{615, 13040}, {610, 13030}, {595, 13020}, {590, 13010}, {580, 13000}, {575, 12090}, {570, 12080},
                {565, 12070}, {560, 12060}, {555, 12050}, {550, 12040}, {1, 12020}};

int ctl_cuda_of(const char *driver_version)
{
    long driver = strtol(driver_version, NULL, 10);

    for (size_t at = 0; at < sizeof(branches) / sizeof(branches[0]); at++)
        if (driver >= branches[at].driver)
            return branches[at].cuda;
    return 0;
}

int ctl_driver(int argc, char **argv)
{
    struct emu_state *state;
    int cuda;

    if (argc != 2)
        return ctl_usage("driver: expected a version, such as 615.71.05");
    cuda = ctl_cuda_of(argv[1]);
    if (cuda == 0 || strlen(argv[1]) >= sizeof(state->driver_version))
        return ctl_usage("driver %s: expected a version, such as 615.71.05", argv[1]);
    state = ctl_open();
    if (state == NULL)
        return CTL_NO_STATE;
    strcpy(state->driver_version, argv[1]);
    state->cuda_version = cuda;
    ctl_close(state);
    return CTL_DONE;
}
