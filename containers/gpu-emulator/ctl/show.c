#include "ctl.h"

#include <stdio.h>
#include <string.h>

static const char *const states[] = {"running", "locked", "checkpointed", "failed"};
static const char *const faults[] = {"lock-timeout", "checkpoint-fails", "restore-fails"};

static const char *state_name(uint32_t state)
{
    return state < sizeof(states) / sizeof(states[0]) ? states[state] : "?";
}

/* The name of a process must not break the line or the JSON. */
static void plain(const char *name, char out[32])
{
    size_t at = 0;

    for (; name[at] != '\0' && at < 31; at++)
        out[at] = name[at] < ' ' || name[at] > '~' || name[at] == '"' || name[at] == '\\' ? '?' : name[at];
    out[at] = '\0';
}

static void show_processes(struct emu_state *state, unsigned gpu, bool json)
{
    const char *between = "";

    for (int slot = 0; slot < EMU_MAX_PROCS; slot++) {
        const struct emu_proc *proc = &state->procs[slot];
        char name[32];

        if (!proc->used || proc->gpu[gpu].contexts == 0)
            continue;
        plain(proc->comm, name);
        printf(json ? "%s{\"pid\": %d, \"own_pid\": %d, \"name\": \"%s\", \"state\": \"%s\", \"bytes\": %llu}"
                    : "%s  pid %d (%d in its own namespace) %s, %s, %llu bytes\n",
               json ? between : "", (int)emu_slot_pid(state, slot), proc->ns_pid, name, state_name(proc->cuda_state),
               (unsigned long long)emu_proc_bytes(state, proc, gpu));
        between = ", ";
    }
}

static void show_gpu_text(struct emu_state *state, unsigned index, uint64_t now_ns)
{
    const struct emu_gpu *gpu = &state->gpus[index];
    char uuid[41], bus[32];

    emu_uuid_text(gpu->uuid, uuid);
    emu_bus_id(gpu, bus);
    printf("GPU %u: %s %s %s\n  %llu of %llu MiB free, %u %% busy, %u mW%s%s\n", index, gpu->name, uuid, bus,
           (unsigned long long)(emu_free_bytes(state, index) / EMU_MIB),
           (unsigned long long)((gpu->total_bytes - gpu->reserved_bytes) / EMU_MIB), emu_utilization(state, gpu, now_ns),
           emu_power_mw(state, gpu, now_ns), gpu->lost ? ", lost" : "", gpu->util_unsupported ? ", utilization unsupported" : "");
    show_processes(state, index, false);
}

static void show_gpu_json(struct emu_state *state, unsigned index, uint64_t now_ns)
{
    const struct emu_gpu *gpu = &state->gpus[index];
    char uuid[41], bus[32];

    emu_uuid_text(gpu->uuid, uuid);
    emu_bus_id(gpu, bus);
    printf("%s{\"index\": %u, \"name\": \"%s\", \"uuid\": \"%s\", \"bus_id\": \"%s\", \"total_bytes\": %llu, \"free_bytes\": %llu, "
           "\"busy_percent\": %u, \"busy_ns\": %llu, \"lost\": %s, \"util_unsupported\": %s, \"processes\": [",
           index == 0 ? "" : ", ", index, gpu->name, uuid, bus, (unsigned long long)gpu->total_bytes,
           (unsigned long long)emu_free_bytes(state, index), emu_utilization(state, gpu, now_ns),
           (unsigned long long)(gpu->timeline.total_busy_ns - emu_busy_ns(gpu, EMU_ANYONE, now_ns, UINT64_MAX)),
           gpu->lost ? "true" : "false", gpu->util_unsupported ? "true" : "false");
    show_processes(state, index, true);
    fputs("]}", stdout);
}

static void show_faults(const struct emu_state *state, bool json)
{
    const char *between = "";

    for (int kind = 0; kind < EMU_FAULT_KINDS; kind++) {
        if (state->faults[kind].remaining == 0)
            continue;
        printf(json ? "%s\"%s\"" : "%sfault: %s\n", json ? between : "", faults[kind]);
        between = ", ";
    }
}

int ctl_show(int argc, char **argv)
{
    bool json = argc == 2 && strcmp(argv[1], "--json") == 0;
    uint64_t now_ns = emu_now_ns();
    struct emu_state *state;

    if (argc > 1 && !json)
        return ctl_usage("show: unexpected argument \"%s\"", argv[1]);
    state = ctl_open();
    if (state == NULL)
        return CTL_NO_STATE;
    if (json)
        printf("{\"state\": \"%s\", \"driver_version\": \"%s\", \"cuda_version\": %d, \"gpus\": [", emu_state_path(),
               state->driver_version, state->cuda_version);
    else
        printf("driver %s, CUDA %d.%d%s\n", state->driver_version, state->cuda_version / 1000, state->cuda_version % 1000 / 10,
               state->nvml_lost ? ", NVML lost" : "");
    for (unsigned gpu = 0; gpu < state->gpu_count; gpu++) {
        if (json)
            show_gpu_json(state, gpu, now_ns);
        else
            show_gpu_text(state, gpu, now_ns);
    }
    fputs(json ? "], \"faults\": [" : "", stdout);
    show_faults(state, json);
    fputs(json ? "]}\n" : "", stdout);
    ctl_close(state);
    return CTL_DONE;
}
