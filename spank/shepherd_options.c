#include "shepherd.h"

#include <stdlib.h>
#include <string.h>

static bool read_number(const char *text, uint32_t *number)
{
    unsigned long long value;
    char *end;

    if (*text < '0' || *text > '9')
        return false;
    value = strtoull(text, &end, 10);
    if (*end != '\0' || value > UINT32_MAX)
        return false;
    *number = (uint32_t)value;
    return true;
}

bool shepherd_options(int argc, char **argv, struct shepherd_options *options)
{
    uint32_t keeper_fd;
    uint32_t image;

    if (argc <= SHEPHERD_ARGUMENTS || strcmp(argv[SHEPHERD_ARGUMENTS - 1], "--") != 0)
        return false;
    if (!read_number(argv[1], &keeper_fd) || keeper_fd > 1U << 20 || !read_number(argv[2], &options->job) ||
        !read_number(argv[3], &options->restarts) || !read_number(argv[4], &image) || image > 1 ||
        !read_number(argv[5], &options->agent_wait_s))
        return false;
    options->keeper_fd = (int)keeper_fd;
    options->image = image == 1;
    options->socket = argv[6];
    options->option = argv[7];
    options->script = argv + SHEPHERD_ARGUMENTS;
    return true;
}
