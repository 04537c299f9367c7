#include "ctl.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GPUS = 1, MODEL, SEED, DRIVER, CUDA, MEMORY, CONTEXT, PERIOD, NO_PERSISTENCE, FORCE };

static const struct option options[] = {
    {"gpus", required_argument, NULL, GPUS},
    {"model", required_argument, NULL, MODEL},
    {"seed", required_argument, NULL, SEED},
    {"driver-version", required_argument, NULL, DRIVER},
    {"cuda-version", required_argument, NULL, CUDA},
    {"memory-mib", required_argument, NULL, MEMORY},
    {"context-mib", required_argument, NULL, CONTEXT},
    {"sample-period-ms", required_argument, NULL, PERIOD},
    {"no-persistence", no_argument, NULL, NO_PERSISTENCE},
    {"force", no_argument, NULL, FORCE},
    {NULL, 0, NULL, 0},
};

struct request {
    struct emu_create create;
    unsigned model_count;
    bool gpus_given, force;
};

static int add_model(struct request *request, const char *key)
{
    const struct emu_model *model = emu_model_find(key);
    char known[256] = "";

    if (model != NULL && request->model_count < EMU_MAX_GPUS) {
        request->create.models[request->model_count++] = model;
        return CTL_DONE;
    }
    if (model != NULL)
        return ctl_usage("more than %d GPUs", EMU_MAX_GPUS);
    for (size_t at = 0; emu_model_at(at) != NULL; at++) {
        strcat(known, at == 0 ? "" : ", ");
        strcat(known, emu_model_at(at)->key);
    }
    return ctl_usage("no GPU model \"%s\": %s", key, known);
}

static int parse_number(const char *name, unsigned long long least, unsigned long long most, unsigned long long *out)
{
    return ctl_number(optarg, least, most, out) ? CTL_DONE
                                                : ctl_usage("--%s %s: expected an integer from %llu to %llu", name, optarg, least, most);
}

static int parse_option(struct request *request, int option)
{
    unsigned long long number;
    int major, minor, end, rc;

    switch (option) {
    case GPUS:
        rc = parse_number("gpus", 0, EMU_MAX_GPUS, &number);
        request->create.gpu_count = (unsigned)number;
        request->gpus_given = true;
        return rc;
    case MODEL:
        return add_model(request, optarg);
    case SEED:
        request->create.seed = optarg;
        return CTL_DONE;
    case DRIVER:
        request->create.driver_version = optarg;
        return strlen(optarg) < 32 ? CTL_DONE : ctl_usage("--driver-version %s: too long", optarg);
    case CUDA:
        if (sscanf(optarg, "%d.%d%n", &major, &minor, &end) != 2 || optarg[end] != '\0')
            return ctl_usage("--cuda-version %s: expected a version, such as 13.0", optarg);
        request->create.cuda_version = major * 1000 + minor * 10;
        return CTL_DONE;
    case MEMORY:
        rc = parse_number("memory-mib", 1, 1ULL << 24, &number);
        request->create.memory_mib = number;
        return rc;
    case CONTEXT:
        rc = parse_number("context-mib", 0, 1ULL << 20, &number);
        request->create.context_mib = number;
        return rc;
    case PERIOD:
        rc = parse_number("sample-period-ms", 1, 10000, &number);
        request->create.sample_period_ms = number;
        return rc;
    case NO_PERSISTENCE:
        request->create.persistence = false;
        return CTL_DONE;
    case FORCE:
        request->force = true;
        return CTL_DONE;
    default:
        return ctl_usage("init: unknown option");
    }
}

/* The driver version, and its CUDA version if none is given. */
static int set_driver(struct request *request)
{
    struct emu_create *create = &request->create;

    if (create->cuda_version == 0)
        create->cuda_version = ctl_cuda_of(create->driver_version);
    return create->cuda_version > 0 ? CTL_DONE : ctl_usage("--driver-version %s: expected a version, such as 580.95.05", create->driver_version);
}

/* One model applies to all GPUs; otherwise there is one for each GPU. */
static int spread_models(struct request *request)
{
    struct emu_create *create = &request->create;

    if (request->model_count == 0)
        create->models[request->model_count++] = emu_model_find("a100-80g");
    if (!request->gpus_given)
        create->gpu_count = request->model_count > 1 ? request->model_count : 2;
    if (request->model_count > 1 && request->model_count != create->gpu_count)
        return ctl_usage("--gpus %u with %u models: give one model, or one for each GPU", create->gpu_count, request->model_count);
    for (unsigned gpu = request->model_count; gpu < create->gpu_count; gpu++)
        create->models[gpu] = create->models[0];
    return CTL_DONE;
}

/* Processes that use the old state would not use the new one. */
static bool in_use(void)
{
    struct emu_state *state = emu_attach();
    bool used = false;

    if (state == NULL)
        return false;
    emu_lock(state);
    emu_sweep(state);
    for (int slot = 0; slot < EMU_MAX_PROCS; slot++)
        used = used || state->procs[slot].used;
    ctl_close(state);
    return used;
}

static void make_directory(const char *path)
{
    char directory[4096];
    char *slash;

    snprintf(directory, sizeof(directory), "%s", path);
    slash = strrchr(directory, '/');
    if (slash != NULL && slash != directory) {
        *slash = '\0';
        mkdir(directory, 0755);
    }
}

int ctl_init(int argc, char **argv)
{
    struct request request = {.create = {.path = emu_state_path(), .driver_version = "580.95.05",
                                         .context_mib = 414, .sample_period_ms = 1000, .persistence = true}};
    char host[256] = "node";
    int option, rc;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        rc = parse_option(&request, option);
        if (rc != CTL_DONE)
            return rc;
    }
    if (optind < argc)
        return ctl_usage("init: unexpected argument \"%s\"", argv[optind]);
    rc = spread_models(&request);
    if (rc == CTL_DONE)
        rc = set_driver(&request);
    if (rc != CTL_DONE)
        return rc;
    gethostname(host, sizeof(host) - 1);
    if (request.create.seed == NULL)
        request.create.seed = host;
    if (!request.force && in_use()) {
        fprintf(stderr, "gpu-emulatorctl: %s is in use: end the processes that `gpu-emulatorctl show` lists, or use --force\n",
                request.create.path);
        return CTL_FAILED;
    }
    make_directory(request.create.path);
    rc = emu_create(&request.create);
    if (rc != 0) {
        fprintf(stderr, "gpu-emulatorctl: %s: %s\n", request.create.path, strerror(rc));
        return CTL_FAILED;
    }
    printf("%s: %u GPUs\n", request.create.path, request.create.gpu_count);
    return CTL_DONE;
}
