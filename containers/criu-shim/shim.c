/*
 * Lets criu run in test containers. Loaded with LD_PRELOAD, it wraps functions that fail there.
 *
 * On hosts that cannot grant CAP_SYS_RESOURCE: prlimit(2) on another user's process needs that capability even for reading,
 * and criu reads the limits of every process that it dumps. A denied read is done from /proc/PID/limits, which root may
 * read; limits still cannot be set. criu calls prlimit through syscall(3), so this function is wrapped.
 *
 * On Linux 6.16 and later: internet sockets have no SO_PASSCRED and SO_PASSSEC, which criu before 4.2 reads from every
 * socket. The library returns the value on older kernels: off.
 */
#define _GNU_SOURCE
#include "limits.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

typedef long (*syscall_fn)(long, ...);
typedef int (*getsockopt_fn)(int, int, int, void *, socklen_t *);

static long refused_read(pid_t pid, int resource, struct rlimit *old, int error)
{
	if (shim_read_limit(pid, resource, old) == 0)
		return 0;
	errno = error;
	return -1;
}

long syscall(long number, ...)
{
	static syscall_fn next;
	long a[6];
	va_list list;

	va_start(list, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(list, long);
	va_end(list);
	if (!next) {
		/* ISO C has no conversion from an object pointer to a function pointer; POSIX requires it. */
		*(void **)&next = dlsym(RTLD_NEXT, "syscall");
		if (!next)
			abort();
	}
	long result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (number == SYS_prlimit64 && result == -1 && errno == EPERM && !a[2] && a[3])
		return refused_read((pid_t)a[0], (int)a[1], (struct rlimit *)a[3], EPERM);
	return result;
}

int prlimit(pid_t pid, __rlimit_resource_t resource, const struct rlimit *new_limit, struct rlimit *old_limit)
{
	return (int)syscall(SYS_prlimit64, pid, (int)resource, new_limit, old_limit);
}

int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict size)
{
	static getsockopt_fn next;

	if (!next) {
		*(void **)&next = dlsym(RTLD_NEXT, "getsockopt");
		if (!next)
			abort();
	}
	int result = next(fd, level, name, value, size);
	if (result == -1 && errno == EOPNOTSUPP && level == SOL_SOCKET && (name == SO_PASSCRED || name == SO_PASSSEC)) {
		memset(value, 0, *size);
		return 0;
	}
	return result;
}
