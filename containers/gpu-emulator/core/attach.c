#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t mapping_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct emu_state *mapping;
static unsigned mapping_users;

/* A child of fork() does not inherit its parent's use of the driver. */
static void forget_in_child(void)
{
    emu_unmap(mapping);
    mapping = NULL;
    mapping_users = 0;
    pthread_mutex_init(&mapping_mutex, NULL);
}

__attribute__((constructor)) static void watch_fork(void)
{
    pthread_atfork(NULL, NULL, forget_in_child);
}

const char *emu_state_path(void)
{
    const char *path = getenv("GPU_EMULATOR_STATE");

    return path != NULL && path[0] != '\0' ? path : EMU_DEFAULT_STATE;
}

struct emu_state *emu_map_file(const char *path)
{
    struct emu_state *state = MAP_FAILED;
    struct stat info;
    int saved;
    int fd = open(path, O_RDWR | O_CLOEXEC);

    if (fd < 0)
        return NULL;
    if (fstat(fd, &info) == 0 && info.st_size == (off_t)sizeof(*state))
        state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    else
        errno = EPROTO;
    saved = errno;
    close(fd);
    errno = saved;
    if (state == MAP_FAILED)
        return NULL;
    if (state->magic != EMU_MAGIC || state->layout != EMU_LAYOUT || state->size != sizeof(*state)) {
        munmap(state, sizeof(*state));
        errno = EPROTO;
        return NULL;
    }
    return state;
}

void emu_unmap(struct emu_state *state)
{
    if (state != NULL)
        munmap(state, sizeof(*state));
}

struct emu_state *emu_attach(void)
{
    struct emu_state *state;

    pthread_mutex_lock(&mapping_mutex);
    if (mapping == NULL)
        mapping = emu_map_file(emu_state_path());
    state = mapping;
    if (state != NULL)
        mapping_users++;
    pthread_mutex_unlock(&mapping_mutex);
    return state;
}

void emu_detach(void)
{
    pthread_mutex_lock(&mapping_mutex);
    if (mapping_users > 0 && --mapping_users == 0) {
        emu_unmap(mapping);
        mapping = NULL;
    }
    pthread_mutex_unlock(&mapping_mutex);
}

/* The owner may have died with the mutex held. An interrupted update leaves nothing to repair (see state.h). */
void emu_lock(struct emu_state *state)
{
    if (pthread_mutex_lock(&state->mutex) == EOWNERDEAD)
        pthread_mutex_consistent(&state->mutex);
}

void emu_unlock(struct emu_state *state)
{
    pthread_mutex_unlock(&state->mutex);
}
