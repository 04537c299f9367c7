/* Requests of one process to the restore thread of another: lock, checkpoint, restore, unlock.
 *
 * A request is stored in the node's state; a real-time signal to that thread contains its position. The thread waits in
 * sigwaitinfo() and holds no descriptor, mapping or socket while it waits. The image of a checkpointed process is therefore
 * that of a plain program, and after a restore on another node the thread can be reached through the state of that node. It
 * is found by its name among the threads of /proc/PID/task, which works across PID namespaces.
 */
#include "core.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_LOCKS 4096 /* offset of the record locks of requests; those of slots begin at 0 */
#define LOOK_AGAIN_NS 200000000ULL
/* A thread that has not accepted the request by then is stopped or frozen. */
#define TAKE_NS 30000000000ULL
#define INDEX_BITS 8

static bool own_requests[EMU_MAX_REQUESTS]; /* guarded by the state's mutex */

int emu_restore_signal(void)
{
    return SIGRTMAX - 3;
}

static bool is_restore_thread(const char *task, const char *tid)
{
    char path[320], name[32] = "";
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s/comm", task, tid);
    file = fopen(path, "re");
    if (file == NULL)
        return false;
    if (fgets(name, sizeof(name), file) == NULL)
        name[0] = '\0';
    fclose(file);
    name[strcspn(name, "\n")] = '\0';
    return strcmp(name, EMU_RESTORE_THREAD) == 0;
}

pid_t emu_restore_thread(pid_t pid)
{
    char task[32];
    struct dirent *entry;
    pid_t found = -1;
    DIR *dir;

    if (pid <= 0)
        return -1;
    snprintf(task, sizeof(task), "/proc/%d/task", (int)pid);
    dir = opendir(task);
    if (dir == NULL)
        return -1;
    while (found < 0 && (entry = readdir(dir)) != NULL) {
        pid_t tid = (pid_t)strtol(entry->d_name, NULL, 10);

        if (tid > 0 && tid != pid && is_restore_thread(task, entry->d_name))
            found = tid;
    }
    closedir(dir);
    return found;
}

bool emu_alive(pid_t pid)
{
    return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM);
}

static bool is_stopped(pid_t pid)
{
    char path[32], line[512] = "";
    const char *state;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    file = fopen(path, "re");
    if (file == NULL)
        return false;
    if (fgets(line, sizeof(line), file) == NULL)
        line[0] = '\0';
    fclose(file);
    state = strrchr(line, ')');
    return state != NULL && state[1] == ' ' && (state[2] == 'T' || state[2] == 't');
}

bool emu_runs(pid_t pid)
{
    uint64_t deadline_ns = emu_now_ns() + TAKE_NS;

    while (is_stopped(pid)) {
        if (emu_now_ns() > deadline_ns)
            return false;
        emu_sleep_until(emu_now_ns() + LOOK_AGAIN_NS / 20);
    }
    return true;
}

static struct emu_request *claim(struct emu_state *state, const struct emu_order *order)
{
    for (int index = 0; index < EMU_MAX_REQUESTS; index++) {
        struct emu_request *request = &state->requests[index];

        if (own_requests[index] || (request->used && emu_locks_holder(REQUEST_LOCKS + index) != -1))
            continue;
        if (!emu_locks_take(REQUEST_LOCKS + index))
            continue;
        own_requests[index] = true;
        *request = (struct emu_request){.used = 1, .nonce = ++state->next_nonce, .op = order->op,
                                        .timeout_ms = order->timeout_ms, .pair_count = order->pair_count};
        memcpy(request->pairs, order->pairs, sizeof(request->pairs));
        return request;
    }
    return NULL;
}

static void give_up(struct emu_state *state, struct emu_request *request)
{
    int index = (int)(request - state->requests);

    request->used = 0;
    request->nonce = 0;
    own_requests[index] = false;
    emu_locks_drop(REQUEST_LOCKS + index);
}

static enum emu_post ring(struct emu_state *state, const struct emu_request *request, pid_t pid, pid_t tid)
{
    uint64_t ticket = request->nonce << INDEX_BITS | (uint64_t)(request - state->requests);
    siginfo_t info;

    memset(&info, 0, sizeof(info));
    info.si_signo = emu_restore_signal();
    info.si_code = SI_QUEUE;
    info.si_pid = getpid();
    info.si_uid = getuid();
    info.si_value.sival_ptr = (void *)(uintptr_t)ticket;
    if (syscall(SYS_rt_tgsigqueueinfo, pid, tid, info.si_signo, &info) == 0)
        return EMU_POST_OK;
    return errno == EPERM ? EMU_POST_DENIED : errno == EAGAIN ? EMU_POST_FULL : EMU_POST_GONE;
}

static enum emu_post await(struct emu_request *request, pid_t pid, pid_t tid)
{
    uint64_t taken_by_ns = emu_now_ns() + TAKE_NS;

    for (;;) {
        uint32_t status = __atomic_load_n(&request->status, __ATOMIC_ACQUIRE);

        if (status == EMU_DONE)
            return EMU_POST_OK;
        if (status == EMU_POSTED && emu_now_ns() > taken_by_ns)
            return EMU_POST_LOST;
        if (!emu_futex_wait(&request->status, status, emu_now_ns() + LOOK_AGAIN_NS) &&
            syscall(SYS_tgkill, pid, tid, 0) != 0 && errno == ESRCH)
            return EMU_POST_GONE;
    }
}

enum emu_post emu_post(struct emu_state *state, pid_t pid, pid_t tid, const struct emu_order *order, int *result)
{
    struct emu_request *request;
    enum emu_post rc;

    if (emu_locks_get() < 0)
        return EMU_POST_FULL;
    emu_lock(state);
    request = claim(state, order);
    emu_unlock(state);
    if (request == NULL) {
        emu_locks_put();
        return EMU_POST_FULL;
    }
    rc = ring(state, request, pid, tid);
    if (rc == EMU_POST_OK)
        rc = await(request, pid, tid);
    emu_lock(state);
    *result = request->result;
    give_up(state, request);
    emu_unlock(state);
    emu_locks_put();
    return rc;
}

/* In the restore thread. NULL: the requester no longer waits. */
struct emu_request *emu_take(struct emu_state *state, uint64_t ticket, struct emu_order *out)
{
    struct emu_request *request = &state->requests[(ticket & ((1U << INDEX_BITS) - 1)) % EMU_MAX_REQUESTS];

    emu_lock(state);
    if (!request->used || request->nonce != ticket >> INDEX_BITS || request->pair_count > EMU_MAX_GPUS) {
        emu_unlock(state);
        return NULL;
    }
    *out = (struct emu_order){.op = request->op, .timeout_ms = request->timeout_ms, .pair_count = request->pair_count};
    memcpy(out->pairs, request->pairs, sizeof(out->pairs));
    __atomic_store_n(&request->status, EMU_TAKEN, __ATOMIC_RELEASE);
    emu_unlock(state);
    return request;
}

void emu_done(struct emu_state *state, struct emu_request *request, uint64_t ticket, int result)
{
    emu_lock(state);
    if (request->used && request->nonce == ticket >> INDEX_BITS) {
        request->result = result;
        __atomic_store_n(&request->status, EMU_DONE, __ATOMIC_RELEASE);
        emu_futex_wake(&request->status);
    }
    emu_unlock(state);
}
