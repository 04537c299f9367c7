#include "announcement.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_BYTES 1024
#define STARTED_FIELD 19 /* of /proc/PID/stat, counted from the state */

static bool fail(char *error, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool fail(char *error, size_t size, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(error, size, format, arguments);
    va_end(arguments);
    return false;
}

/* Whether only this user can change it. */
static bool is_own(const struct stat *found)
{
    return found->st_uid == geteuid() && (found->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool announcement_program(const char *path, struct stat *program, char *error, size_t size)
{
    int fd = open(path, O_PATH | O_CLOEXEC);
    bool known = fd >= 0 && fstat(fd, program) == 0;

    if (fd >= 0)
        close(fd);
    if (!known)
        return fail(error, size, "%s cannot be executed, or has another version: %s", path, strerror(errno));
    if (!S_ISREG(program->st_mode) || !is_own(program))
        return fail(error, size, "%s: not a file that belongs to root and that only root can change", path);
    /* A process that traces the shepherd from its first instruction can impersonate it. The kernel denies that for a program
     * that the tracer cannot read. */
    if ((program->st_mode & (S_IRGRP | S_IROTH)) != 0)
        return fail(error, size, "%s: users can read it, and so could trace it: its mode has to be 0711", path);
    return true;
}

/* Opens a directory of root, and creates it if missing. -1: errno is set. */
static int open_directory(int above, const char *name, mode_t mode)
{
    struct stat found;
    bool made = mkdirat(above, name, mode) == 0;
    int fd;

    if (!made && errno != EEXIST)
        return -1;
    fd = openat(above, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (fstat(fd, &found) == 0 && is_own(&found) && (!made || fchmod(fd, mode) == 0)) /* independent of the umask */
        return fd;
    close(fd);
    errno = EPERM;
    return -1;
}

static int open_announcements(const char *socket, char *error, size_t size)
{
    const char *slash = strrchr(socket, '/');
    char path[PATH_MAX];
    int directory;
    int above;

    if (slash == NULL || slash == socket || (size_t)(slash - socket) >= sizeof(path)) {
        fail(error, size, "%s: has no directory of its own", socket);
        return -1;
    }
    memcpy(path, socket, (size_t)(slash - socket));
    path[slash - socket] = '\0';
    above = open_directory(AT_FDCWD, path, 0755);
    if (above < 0) {
        fail(error, size, "%s: %s", path,
             errno == EPERM ? "not a directory that only root can change" : strerror(errno));
        return -1;
    }
    directory = open_directory(above, ANNOUNCEMENTS, 0700);
    if (directory < 0)
        fail(error, size, "%s/" ANNOUNCEMENTS ": %s", path,
             errno == EPERM ? "not a directory that only root can change" : strerror(errno));
    close(above);
    return directory;
}

/* The start time in ticks since boot; 0: unknown. */
static uint64_t started(pid_t pid)
{
    char path[40];
    char text[TEXT_BYTES];
    ssize_t length;
    char *rest;
    char *field;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    length = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    rest = strrchr(text, ')'); /* the name of the process may contain any character */
    if (rest == NULL || rest[1] != ' ')
        return 0;
    rest += 2;
    for (int skipped = 0; skipped < STARTED_FIELD; skipped++)
        strsep(&rest, " ");
    field = strsep(&rest, " ");
    return field == NULL ? 0 : strtoull(field, NULL, 10);
}

static bool find_namespace(pid_t pid, const char *kind, struct stat *found)
{
    char path[48];

    snprintf(path, sizeof(path), "/proc/%d/ns/%s", (int)pid, kind);
    return stat(path, found) == 0;
}

/* Writes the groups of the owner, separated by commas. False: out of memory or an error of the stream. */
static bool write_groups(FILE *stream, const struct announcement_owner *owner)
{
    for (int at = 0; at < owner->group_count; at++)
        fprintf(stream, "%s%ju", at == 0 ? "" : ",", (uintmax_t)owner->groups[at]);
    fputc('\n', stream);
    return ferror(stream) == 0;
}

/* Returns the text, which the caller frees, and its length. NULL: the child has ended, or there is no memory. */
static char *describe(size_t *length, uint32_t job_id, const struct announcement_owner *owner, pid_t shepherd,
                      const struct stat *program)
{
    uint64_t child_started = started(shepherd);
    uint64_t own_started = started(getpid());
    struct stat pids;
    struct stat mounts;
    char *text = NULL;
    FILE *stream;
    bool whole;

    if (child_started == 0 || own_started == 0 || !find_namespace(shepherd, "pid", &pids) ||
        !find_namespace(shepherd, "mnt", &mounts))
        return NULL;
    stream = open_memstream(&text, length);
    if (stream == NULL)
        return NULL;
    fprintf(stream,
            "version=%d\njob=%" PRIu32 "\nuid=%ju\ngid=%ju\npid=%d\nstarted=%" PRIu64 "\nkeeper=%d\nkeeper_started=%" PRIu64
            "\npid_namespace=%ju:%ju\nmount_namespace=%ju:%ju\nprogram=%ju:%ju\ngroups=",
            ANNOUNCEMENT_VERSION, job_id, (uintmax_t)owner->uid, (uintmax_t)owner->gid, (int)shepherd, child_started,
            (int)getpid(), own_started,
            (uintmax_t)pids.st_dev, (uintmax_t)pids.st_ino, (uintmax_t)mounts.st_dev, (uintmax_t)mounts.st_ino,
            (uintmax_t)program->st_dev, (uintmax_t)program->st_ino);
    whole = write_groups(stream, owner);
    if (fclose(stream) == 0 && whole)
        return text;
    free(text);
    return NULL;
}

static bool write_file(struct announcement *made, const char *text, size_t length)
{
    char temporary[sizeof(made->name) + 8];
    struct stat found;
    bool done;
    int fd;

    snprintf(temporary, sizeof(temporary), ".%s.new", made->name);
    unlinkat(made->directory, temporary, 0); /* left by a keeper that was killed */
    fd = openat(made->directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    errno = EIO; /* for a short write, which does not set it */
    done = write(fd, text, length) == (ssize_t)length && fchmod(fd, 0600) == 0 && fstat(fd, &found) == 0 &&
           renameat(made->directory, temporary, made->directory, made->name) == 0;
    close(fd);
    if (!done) {
        int number = errno;

        unlinkat(made->directory, temporary, 0);
        errno = number;
        return false;
    }
    made->device = found.st_dev;
    made->inode = found.st_ino;
    return true;
}

bool announcement_make(struct announcement *made, const char *socket, uint32_t job_id, const struct announcement_owner *owner,
                       pid_t shepherd, const struct stat *program, char *error, size_t size)
{
    size_t length = 0;
    char *text = describe(&length, job_id, owner, shepherd, program);
    bool written;

    made->directory = -1;
    if (text == NULL)
        return fail(error, size, "the shepherd cannot be announced: cannot read the status of process %d", (int)shepherd);
    made->directory = open_announcements(socket, error, size);
    if (made->directory < 0) {
        free(text);
        return false;
    }
    snprintf(made->name, sizeof(made->name), "%" PRIu32, job_id);
    written = write_file(made, text, length);
    free(text);
    if (written)
        return true;
    fail(error, size, "the shepherd cannot be announced: " ANNOUNCEMENTS "/%s: %s", made->name, strerror(errno));
    close(made->directory);
    made->directory = -1;
    return false;
}

bool announcement_withdraw(struct announcement *made)
{
    struct stat found;

    if (made->directory < 0)
        return true;
    if (fstatat(made->directory, made->name, &found, AT_SYMLINK_NOFOLLOW) == 0) {
        if (found.st_dev == made->device && found.st_ino == made->inode && unlinkat(made->directory, made->name, 0) != 0)
            return false;
    } else if (errno != ENOENT) {
        return false;
    }
    close(made->directory);
    made->directory = -1;
    return true;
}
