#include "ctl.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XID_EVENT 8
#define CUDA_UNKNOWN 999

enum { GPU = 1, PID, COUNT, ERROR, FATAL, KILL, OFF };

static const struct option options[] = {
    {"gpu", required_argument, NULL, GPU},     {"pid", required_argument, NULL, PID}, {"count", required_argument, NULL, COUNT},
    {"error", required_argument, NULL, ERROR}, {"fatal", no_argument, NULL, FATAL},   {"kill", no_argument, NULL, KILL},
    {"off", no_argument, NULL, OFF},           {NULL, 0, NULL, 0},
};

struct request {
    const char *kind;
    unsigned long long gpu, xid;
    struct emu_fault fault;
    bool kill, off;
};

/* The PID of the process in its own namespace: the last one of NSpid. */
static int own_pid(pid_t pid)
{
    char path[64], line[256];
    int inner = pid;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    file = fopen(path, "re");
    if (file == NULL)
        return pid;
    while (fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "NSpid:", 6) != 0)
            continue;
        for (const char *at = line + 6; at != NULL && *at != '\0'; at = strpbrk(at + 1, "\t "))
            inner = (int)strtol(at, NULL, 10);
    }
    fclose(file);
    return inner;
}

static int parse_option(struct request *request, int option)
{
    unsigned long long number = 0;

    if (option == GPU || option == PID || option == COUNT || option == ERROR)
        if (!ctl_number(optarg, option == COUNT ? 1 : 0, option == PID ? 1 << 22 : 1000000, &number))
            return ctl_usage("fault: \"%s\" is not a number in the range of the option", optarg);
    switch (option) {
    case GPU:
        request->gpu = number;
        return CTL_DONE;
    case PID:
        request->fault.pid = own_pid((pid_t)number);
        return CTL_DONE;
    case COUNT:
        request->fault.remaining = (uint32_t)number;
        return CTL_DONE;
    case ERROR:
        request->fault.error = (int)number;
        return CTL_DONE;
    case FATAL:
        request->fault.fatal = 1;
        return CTL_DONE;
    case KILL:
        request->kill = true;
        return CTL_DONE;
    case OFF:
        request->off = true;
        return CTL_DONE;
    default:
        return ctl_usage("fault: unknown option");
    }
}

/* The error of the contexts on the GPU after an XID that kills them. */
static int error_of_xid(unsigned long long xid)
{
    switch (xid) {
    case 13:
    case 31:
        return 700; /* CUDA_ERROR_ILLEGAL_ADDRESS */
    case 48:
    case 94:
    case 95:
        return 214; /* CUDA_ERROR_ECC_UNCORRECTABLE */
    default:
        return 719; /* CUDA_ERROR_LAUNCH_FAILED */
    }
}

static void set_fault(struct emu_state *state, enum emu_fault_kind kind, const struct request *request)
{
    state->faults[kind] = request->off ? (struct emu_fault){0} : request->fault;
}

static void clear(struct emu_state *state)
{
    memset(state->faults, 0, sizeof(state->faults));
    state->nvml_lost = 0;
    for (unsigned gpu = 0; gpu < state->gpu_count; gpu++)
        state->gpus[gpu].lost = state->gpus[gpu].util_unsupported = 0;
}

static int apply(struct emu_state *state, const struct request *request)
{
    struct emu_gpu *gpu = &state->gpus[request->gpu < EMU_MAX_GPUS ? request->gpu : 0];

    if (request->gpu >= state->gpu_count)
        return ctl_usage("no GPU %llu: the node has %u", request->gpu, state->gpu_count);
    if (strcmp(request->kind, "clear") == 0) {
        clear(state);
    } else if (strcmp(request->kind, "lock-timeout") == 0) {
        set_fault(state, EMU_FAULT_LOCK_TIMEOUT, request);
    } else if (strcmp(request->kind, "checkpoint-fails") == 0) {
        set_fault(state, EMU_FAULT_CHECKPOINT, request);
    } else if (strcmp(request->kind, "restore-fails") == 0) {
        set_fault(state, EMU_FAULT_RESTORE, request);
    } else if (strcmp(request->kind, "gpu-lost") == 0) {
        gpu->lost = !request->off;
    } else if (strcmp(request->kind, "util-unsupported") == 0) {
        gpu->util_unsupported = !request->off;
    } else if (strcmp(request->kind, "nvml-lost") == 0) {
        state->nvml_lost = !request->off;
    } else if (strcmp(request->kind, "xid") == 0) {
        if (request->kill) {
            gpu->poison_error = error_of_xid(request->xid);
            gpu->poison_epoch++;
        }
        emu_event_post(state, (unsigned)request->gpu, XID_EVENT, request->xid);
    } else {
        return ctl_usage("no fault \"%s\": expected lock-timeout, checkpoint-fails, restore-fails, xid, gpu-lost, util-unsupported, "
                         "nvml-lost or clear",
                         request->kind);
    }
    return CTL_DONE;
}

int ctl_fault(int argc, char **argv)
{
    struct request request = {.fault = {.remaining = UINT32_MAX, .error = CUDA_UNKNOWN}};
    struct emu_state *state;
    int option, rc;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        rc = parse_option(&request, option);
        if (rc != CTL_DONE)
            return rc;
    }
    if (optind >= argc)
        return ctl_usage("fault: expected a kind (see --help)");
    request.kind = argv[optind++];
    if (strcmp(request.kind, "xid") == 0 && (optind >= argc || !ctl_number(argv[optind++], 1, 1000, &request.xid)))
        return ctl_usage("fault xid: expected a number, as in `fault xid 79 --gpu 0`");
    if (optind < argc)
        return ctl_usage("fault: unexpected argument \"%s\"", argv[optind]);
    state = ctl_open();
    if (state == NULL)
        return CTL_NO_STATE;
    rc = apply(state, &request);
    ctl_close(state);
    return rc;
}
