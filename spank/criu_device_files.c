/* CRIU plugin: lets a dump pass over device files of the NVIDIA driver and over connections to services. CRIU loads it as root.
 *
 * A child of fork() inherits descriptors and mappings of /dev/nvidia* from a parent that uses CUDA, and cannot use them. CRIU
 * refuses to dump such files unless a plugin accepts them. The agent has decided which processes may have them: it loads this
 * plugin only then, and passes the major numbers of the driver in MAJORS_VARIABLE. Nothing is read, written or kept here.
 * A restore does not need the plugin: the agent replaces these files in its copy of the image.
 *
 * CRIU refuses a connected UNIX socket whose other end is outside the process tree, unless a plugin accepts it. The agent has
 * decided which connections their clients open again, such as those to SSSD, and passes the inodes of the sockets in
 * CLOSED_VARIABLE. A restore gives the process a socket whose other end is closed.
 *
 * Facts about CRIU's interface, from version 4.1: a plugin exports CR_PLUGIN_DESC; its version is not newer than CRIU's; it
 * declares no more hooks than CRIU has (12 in 4.1, 13 in 4.2). So it declares the hooks up to the last one that it needs.
 */
#include "criu_device_files.h"

#include "number.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#define VERSION 0x000200 /* 0.2.0: mappings of device files */

enum { DUMP_UNIX_SOCKET = 0, DUMP_EXTERNAL_FILE = 2, HANDLE_DEVICE_MAPPING = 7, HOOKS };

struct description {
    const char *name;
    int (*begin)(int stage);
    void (*end)(int stage, int status);
    unsigned version;
    unsigned hook_count;
    void *hooks[HOOKS];
};

bool is_listed(const char *majors, uint32_t wanted)
{
    uint32_t number;

    while (majors != NULL && wanted != 0 && read_number(&majors, &number)) {
        if (number == wanted)
            return true;
        if (*majors++ != ',')
            return false;
    }
    return false;
}

bool is_closed_socket(const char *inodes, uint32_t wanted)
{
    while (inodes != NULL && *inodes >= '0' && *inodes <= '9') {
        char *end;
        unsigned long long inode = strtoull(inodes, &end, 10);

        if (inode == wanted)
            return wanted != 0;
        if (*end != ',')
            return false;
        inodes = end + 1;
    }
    return false;
}

/* 0: the file is one of the driver's. -ENOTSUP: CRIU refuses it, as without a plugin. */
static int accept(const struct stat *facts)
{
    bool device = S_ISCHR(facts->st_mode) || S_ISBLK(facts->st_mode);

    return device && is_listed(getenv(MAJORS_VARIABLE), major(facts->st_rdev)) ? 0 : -ENOTSUP;
}

/* A connected UNIX socket with an end outside the process tree. CRIU passes its inode, of 32 bits in sock_diag(7), as an int. */
static int dump_unix_socket(int fd, int inode)
{
    (void)fd;
    return is_closed_socket(getenv(CLOSED_VARIABLE), (uint32_t)inode) ? 0 : -ENOTSUP;
}

/* A descriptor of a type that CRIU does not know. */
static int dump_file(int fd, int id)
{
    struct stat facts;

    (void)id;
    return fstat(fd, &facts) == 0 ? accept(&facts) : -errno;
}

/* A mapping of a file that is neither regular nor /dev/zero. */
static int handle_mapping(int fd, const struct stat *facts)
{
    (void)fd;
    return accept(facts);
}

__attribute__((visibility("default"))) struct description CR_PLUGIN_DESC = {
    .name = "slurm-affinode",
    .version = VERSION,
    .hook_count = HOOKS,
    .hooks = {[DUMP_UNIX_SOCKET] = (void *)dump_unix_socket,
              [DUMP_EXTERNAL_FILE] = (void *)dump_file,
              [HANDLE_DEVICE_MAPPING] = (void *)handle_mapping},
};
