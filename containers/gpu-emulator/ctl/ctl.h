#ifndef GPU_EMULATOR_CTL_H
#define GPU_EMULATOR_CTL_H

#include "core.h"

/* Exit codes: 0 done, 2 wrong usage, 3 no state to work on. */
enum { CTL_DONE = 0, CTL_FAILED = 1, CTL_USAGE = 2, CTL_NO_STATE = 3 };

int ctl_init(int argc, char **argv);
int ctl_driver(int argc, char **argv);
int ctl_fault(int argc, char **argv);
int ctl_show(int argc, char **argv);

/* The CUDA version (13000 is 13.0) that comes with a version of the driver; 0 where that is none. */
int ctl_cuda_of(const char *driver_version);
/* One line on standard error, and the exit code of wrong usage. */
int ctl_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The state, locked and swept; NULL after saying why not. ctl_close() must follow. */
struct emu_state *ctl_open(void);
void ctl_close(struct emu_state *state);
/* A whole number within limits, else false. */
bool ctl_number(const char *text, unsigned long long least, unsigned long long most, unsigned long long *out);

#endif
