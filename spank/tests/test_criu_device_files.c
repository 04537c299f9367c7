/* CRIU's plugin accepts device files of the driver, by their major numbers, the listed sockets, and nothing else. */
#include "criu_device_files.h"
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* As CRIU 4.1 sees the plugin. */
extern struct {
    const char *name;
    int (*begin)(int stage);
    void (*end)(int stage, int status);
    unsigned version, hook_count;
    void *hooks[8];
} CR_PLUGIN_DESC;

static int dump_file(int fd)
{
    return ((int (*)(int, int))CR_PLUGIN_DESC.hooks[2])(fd, 1);
}

static int handle_mapping(mode_t mode, unsigned number)
{
    struct stat facts = {.st_mode = mode, .st_rdev = makedev(number, 0)};

    return ((int (*)(int, const struct stat *))CR_PLUGIN_DESC.hooks[7])(-1, &facts);
}

static void lists(void)
{
    CHECK(is_listed("195", 195));
    CHECK(is_listed("195,507,508", 508));
    CHECK(!is_listed("195,507", 50));
    CHECK(!is_listed("0", 0));
    CHECK(!is_listed("", 195));
    CHECK(!is_listed(NULL, 195));
    CHECK(!is_listed("x195", 195));
    CHECK(!is_listed("194;195", 195));
    CHECK(!is_listed("99999999,195", 195));
}

static void descriptors(void)
{
    int null = open("/dev/null", O_RDWR), file = open("/proc/self/stat", O_RDONLY), ends[2];

    CHECK(pipe(ends) == 0);
    setenv(MAJORS_VARIABLE, "195,1", 1);
    CHECK(dump_file(null) == 0);
    CHECK(dump_file(file) == -ENOTSUP);
    CHECK(dump_file(ends[0]) == -ENOTSUP);
    CHECK(dump_file(-1) == -EBADF);
    setenv(MAJORS_VARIABLE, "195", 1);
    CHECK(dump_file(null) == -ENOTSUP);
    unsetenv(MAJORS_VARIABLE);
    CHECK(dump_file(null) == -ENOTSUP);
    close(null);
    close(file);
    close(ends[0]);
    close(ends[1]);
}

static int dump_socket(int inode)
{
    return ((int (*)(int, int))CR_PLUGIN_DESC.hooks[0])(-1, inode);
}

static void sockets(void)
{
    CHECK(is_closed_socket("4000000000", 4000000000U));
    CHECK(!is_closed_socket("4294967297", 1));
    CHECK(!is_closed_socket("99999999999999999999999,12", 11));
    CHECK(!is_closed_socket("0", 0));
    CHECK(!is_closed_socket("-1", UINT32_MAX));
    CHECK(!is_closed_socket("12;13", 13));
    CHECK(!is_closed_socket(" 12", 12));
    setenv(CLOSED_VARIABLE, "71234,4000000000,12", 1);
    CHECK(dump_socket(71234) == 0);
    CHECK(dump_socket((int)4000000000U) == 0);
    CHECK(dump_socket(12) == 0);
    CHECK(dump_socket(1) == -ENOTSUP);
    unsetenv(CLOSED_VARIABLE);
    CHECK(dump_socket(12) == -ENOTSUP);
}

static void mappings(void)
{
    setenv(MAJORS_VARIABLE, "195,507", 1);
    CHECK(handle_mapping(S_IFCHR | 0666, 507) == 0);
    CHECK(handle_mapping(S_IFCHR | 0666, 226) == -ENOTSUP);
    CHECK(handle_mapping(S_IFREG | 0666, 507) == -ENOTSUP);
}

static void interface(void)
{
    CHECK(CR_PLUGIN_DESC.hook_count <= 12);
    CHECK(CR_PLUGIN_DESC.version <= 0x000200);
    for (unsigned hook = 0; hook < CR_PLUGIN_DESC.hook_count; hook++)
        CHECK((CR_PLUGIN_DESC.hooks[hook] != NULL) == (hook == 0 || hook == 2 || hook == 7));
}

int main(void)
{
    lists();
    descriptors();
    sockets();
    mappings();
    interface();
    return 0;
}
