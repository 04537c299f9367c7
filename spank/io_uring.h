/* Denies io_uring to a job: CRIU cannot dump its rings. */
#ifndef AFFINODE_IO_URING_H
#define AFFINODE_IO_URING_H

#include <stdbool.h>

/* Makes io_uring_setup(2) fail with ENOSYS in this process and its descendants, like a kernel without io_uring; libuv and
 * other libraries then use epoll. Called as root: without no_new_privs, setuid programs of the job still work. The filter
 * cannot be removed; CRIU dumps and restores it. False: errno has the reason. */
bool io_uring_deny(void);

#endif
