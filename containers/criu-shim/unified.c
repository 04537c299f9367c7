/*
 * Lets Slurm use cgroup v2 on hosts that have mounted version 1 as well. Loaded into slurmd with LD_PRELOAD: Slurm does not
 * start if /proc/PID/cgroup has lines of version 1. A process that opens this file reads the line of version 2 alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int (*open_fn)(const char *, int, ...);

/* Returns a descriptor of the lines of version 2, or -1. Closes FD. */
static int unified_of(int fd)
{
	char *line = NULL;
	size_t size = 0;
	FILE *from = fdopen(fd, "r");
	int to = memfd_create("cgroup", MFD_CLOEXEC);

	if (from == NULL) {
		close(fd);
	} else {
		while (to >= 0 && getline(&line, &size, from) > 0) {
			if (strncmp(line, "0::", 3) == 0 && write(to, line, strlen(line)) < 0) {
				close(to);
				to = -1;
			}
		}
		fclose(from);
	}
	free(line);
	if (to >= 0)
		lseek(to, 0, SEEK_SET);
	return to;
}

int open(const char *path, int flags, ...)
{
	static open_fn next;
	mode_t mode = 0;
	va_list list;

	if (!next) {
		/* ISO C has no conversion from an object pointer to a function pointer; POSIX requires it. */
		*(void **)&next = dlsym(RTLD_NEXT, "open");
		if (!next)
			abort();
	}
	if (flags & (O_CREAT | O_TMPFILE)) {
		va_start(list, flags);
		mode = va_arg(list, mode_t);
		va_end(list);
	}
	int fd = next(path, flags, mode);
	if (fd >= 0 && fnmatch("/proc/*/cgroup", path, FNM_PATHNAME) == 0)
		return unified_of(fd);
	return fd;
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));
