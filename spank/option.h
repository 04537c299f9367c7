/* The value of --gpu-suspend-idle: grammar, limits, and the form that is passed to the agent.
 *
 *   WINDOW[,key=value...]
 *
 * Pure: nothing here reads a file, a clock or Slurm.
 */
#ifndef AFFINODE_OPTION_H
#define AFFINODE_OPTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OPTION_NAME "gpu-suspend-idle"
#define OPTION_ERROR_BYTES 512
#define OPTION_TEXT_BYTES 160 /* of option_format() */

enum suspend_mode { MODE_REQUEUE, MODE_INPLACE, MODES };
enum suspend_when { WHEN_PRESSURE, WHEN_ALWAYS, WHENS };
enum suspend_steps { STEPS_SLURM, STEPS_LOCAL, STEPS };
enum suspend_after_loss { AFTER_LOSS_SITE, AFTER_LOSS_IMAGE, AFTER_LOSS_START, AFTER_LOSS_HOLD, AFTER_LOSSES };

struct suspend_option {
    uint32_t window_s;
    uint32_t util_centi; /* hundredths of a percent */
    enum suspend_mode mode;
    enum suspend_when when;
    enum suspend_steps steps; /* srun in the script: Slurm's, or the launcher */
    enum suspend_after_loss after_loss; /* if the attempt is lost after a restore; AFTER_LOSS_SITE: not given */
    char wake[32];     /* "auto", "hold", or a time in the format of scontrol */
    char signal[12];   /* name without SIG; empty: none */
    uint32_t before_s; /* time from the signal to the suspension */
    bool io_uring;     /* the job may use io_uring, and then cannot be checkpointed; not passed to the agent */
};

struct option_limits {
    uint32_t min_window_s;
    uint32_t max_window_s;
    unsigned modes; /* bits 1 << MODE_... */
};

/* The defaults and limits where neither the user nor the site sets them. */
extern const struct suspend_option option_builtin;
extern const struct option_limits option_builtin_limits;

/* Parses TEXT (NULL or empty: no value) on top of DEFAULTS. False: ERROR has one line with the value and the allowed values;
 * *OPTION is then invalid. */
bool option_parse(const char *text, const struct suspend_option *defaults, struct suspend_option *option, char *error,
                  size_t size);

/* False: OPTION exceeds a limit of the site; ERROR has it. */
bool option_check(const struct suspend_option *option, const struct option_limits *limits, char *error, size_t size);

/* "window=900,util=0,mode=requeue,wake=auto,when=pressure[,signal=USR1@10][,steps=local][,after_loss=hold]". SIZE is at least OPTION_TEXT_BYTES. */
void option_format(const struct suspend_option *option, char *text, size_t size);

/* Index of TEXT among the mode names, -1: none. */
int option_mode(const char *text);

/* Copies TEXT for a message: truncated to SIZE, with control characters replaced. */
void option_shown(const char *text, char *shown, size_t size);

#endif
