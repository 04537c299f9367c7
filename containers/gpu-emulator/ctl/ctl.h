#ifndef GPU_EMULATOR_CTL_H
#define GPU_EMULATOR_CTL_H

#include "core.h"

/* Exit codes: 0 success, 2 usage error, 3 no state. */
enum { CTL_DONE = 0, CTL_FAILED = 1, CTL_USAGE = 2, CTL_NO_STATE = 3 };

int ctl_init(int argc, char **argv);
int ctl_driver(int argc, char **argv);
int ctl_fault(int argc, char **argv);
int ctl_show(int argc, char **argv);

/* The CUDA version of a driver version (13000: 13.0); 0: not a driver version. */
int ctl_cuda_of(const char *driver_version);
/* Prints one line to standard error, and returns the exit code of a usage error. */
int ctl_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Opens the state: locked, without resources of dead processes. NULL: it has printed the reason. Call ctl_close(). */
struct emu_state *ctl_open(void);
void ctl_close(struct emu_state *state);
/* Parses an integer within limits. False: it is not one. */
bool ctl_number(const char *text, unsigned long long least, unsigned long long most, unsigned long long *out);

#endif
