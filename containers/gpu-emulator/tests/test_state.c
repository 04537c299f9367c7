#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

static void await(pid_t child, int expected)
{
    int status;

    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) ? WEXITSTATUS(status) == expected : -WTERMSIG(status) == expected);
}

static void invalid_state_is_rejected(void)
{
    int fd;

    setenv("GPU_EMULATOR_STATE", "/nonexistent/state", 1);
    CHECK(emu_attach() == NULL && errno == ENOENT);
    new_state(2, 1024);
    fd = open(emu_state_path(), O_WRONLY | O_TRUNC);
    CHECK(fd >= 0 && write(fd, "no state", 8) == 8);
    close(fd);
    CHECK(emu_attach() == NULL && errno == EPROTO);
}

static void same_seed_gives_the_same_gpus(void)
{
    uint8_t first[16], second[16];
    struct emu_state *state;

    new_state(2, 1024);
    state = emu_attach();
    CHECK(state != NULL);
    memcpy(first, state->gpus[0].uuid, 16);
    memcpy(second, state->gpus[1].uuid, 16);
    emu_detach();
    CHECK(memcmp(first, second, 16) != 0);
    new_state(2, 1024);
    state = emu_attach();
    CHECK(memcmp(first, state->gpus[0].uuid, 16) == 0);
    emu_detach();
}

static void mutex_of_dead_owner_is_recovered(void)
{
    struct emu_state *state;
    pid_t child;

    new_state(1, 1024);
    child = fork();
    if (child == 0) {
        emu_lock(emu_attach());
        _exit(7);
    }
    await(child, 7);
    state = emu_attach();
    emu_lock(state);
    emu_unlock(state);
    emu_lock(state);
    emu_unlock(state);
    emu_detach();
}

static void resources_of_dead_process_are_freed(void)
{
    struct emu_state *state;
    int ready[2];
    pid_t child;
    char byte;

    new_state(1, 1024);
    CHECK(pipe(ready) == 0);
    child = fork();
    if (child == 0) {
        state = emu_attach();
        emu_lock(state);
        CHECK(emu_slot_open(state) == 0);
        state->procs[0].gpu[0] = (struct emu_proc_gpu){.bytes = 100 * EMU_MIB, .contexts = 1};
        emu_unlock(state);
        CHECK(write(ready[1], "x", 1) == 1);
        pause();
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    state = emu_attach();
    emu_lock(state);
    emu_sweep(state);
    CHECK(emu_slot_pid(state, 0) == child);
    CHECK(emu_slot_of_pid(state, child) == 0);
    CHECK(emu_free_bytes(state, 0) == (1024 - 200) * EMU_MIB);
    emu_unlock(state);
    CHECK(kill(child, SIGKILL) == 0);
    await(child, -SIGKILL);
    emu_lock(state);
    emu_sweep(state);
    CHECK(emu_free_bytes(state, 0) == 1024 * EMU_MIB);
    CHECK(emu_slot_of_pid(state, child) == -1);
    emu_unlock(state);
    emu_detach();
    close(ready[0]);
    close(ready[1]);
}

static void child_inherits_no_slot(void)
{
    struct emu_state *state;
    pid_t child, parent = getpid();

    new_state(1, 1024);
    state = emu_attach();
    emu_lock(state);
    CHECK(emu_slot_open(state) == 0);
    emu_unlock(state);
    child = fork();
    if (child == 0) {
        state = emu_attach();
        emu_lock(state);
        emu_sweep(state);
        CHECK(emu_slot_own() == -1);
        CHECK(emu_slot_pid(state, 0) == parent);
        emu_unlock(state);
        emu_detach();
        _exit(0);
    }
    await(child, 0);
    emu_lock(state);
    CHECK(emu_slot_pid(state, 0) == parent); /* still, after the child closed its copy of the lock file */
    emu_slot_close(state);
    CHECK(emu_slot_pid(state, 0) == -1);
    emu_unlock(state);
    emu_detach();
}

int main(void)
{
    invalid_state_is_rejected();
    same_seed_gives_the_same_gpus();
    mutex_of_dead_owner_is_recovered();
    resources_of_dead_process_are_freed();
    child_inherits_no_slot();
    drop_state();
    return 0;
}
