#include "ctl.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "gpu-emulatorctl: the emulated GPUs of this node\n"
    "\n"
    "  gpu-emulatorctl init [--gpus N] [--model MODEL]... [--seed TEXT] [--driver-version V] [--cuda-version MAJOR.MINOR]\n"
    "                       [--memory-mib N] [--context-mib N] [--sample-period-ms N] [--no-persistence] [--force]\n"
    "  gpu-emulatorctl show [--json]\n"
    "  gpu-emulatorctl driver VERSION\n"
    "  gpu-emulatorctl fault lock-timeout [--pid PID] [--count N]\n"
    "  gpu-emulatorctl fault checkpoint-fails|restore-fails [--error CODE] [--fatal] [--pid PID] [--count N]\n"
    "  gpu-emulatorctl fault xid NUMBER [--gpu INDEX] [--kill]\n"
    "  gpu-emulatorctl fault gpu-lost|util-unsupported [--gpu INDEX]\n"
    "  gpu-emulatorctl fault nvml-lost\n"
    "  gpu-emulatorctl fault KIND --off, gpu-emulatorctl fault clear\n"
    "\n"
    "The state is the file of --state PATH (the first option), else of GPU_EMULATOR_STATE, else " EMU_DEFAULT_STATE ".\n";

int ctl_usage(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    fputs("gpu-emulatorctl: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs(" (see gpu-emulatorctl --help)\n", stderr);
    va_end(arguments);
    return CTL_USAGE;
}

bool ctl_number(const char *text, unsigned long long least, unsigned long long most, unsigned long long *out)
{
    char *end;

    errno = 0;
    *out = strtoull(text, &end, 10);
    return errno == 0 && end != text && *end == '\0' && text[0] != '-' && *out >= least && *out <= most;
}

struct emu_state *ctl_open(void)
{
    struct emu_state *state = emu_attach();

    if (state == NULL) {
        fprintf(stderr, "gpu-emulatorctl: %s: %s; create it with `gpu-emulatorctl init`\n", emu_state_path(),
                errno == EPROTO ? "it is of another version" : strerror(errno));
        return NULL;
    }
    emu_lock(state);
    emu_sweep(state);
    return state;
}

void ctl_close(struct emu_state *state)
{
    emu_unlock(state);
    emu_detach();
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "--state") == 0) {
        setenv("GPU_EMULATOR_STATE", argv[2], 1);
        argc -= 2;
        argv += 2;
    }
    if (argc < 2)
        return ctl_usage("expected a command: init, show, driver or fault");
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        fputs(help, stdout);
        return CTL_DONE;
    }
    if (strcmp(argv[1], "init") == 0)
        return ctl_init(argc - 1, argv + 1);
    if (strcmp(argv[1], "show") == 0)
        return ctl_show(argc - 1, argv + 1);
    if (strcmp(argv[1], "driver") == 0)
        return ctl_driver(argc - 1, argv + 1);
    if (strcmp(argv[1], "fault") == 0)
        return ctl_fault(argc - 1, argv + 1);
    return ctl_usage("no command \"%s\": expected init, show, driver or fault", argv[1]);
}
