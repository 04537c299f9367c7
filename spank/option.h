/* The value of --gpu-suspend-idle: its grammar, its limits, the form in which it travels.
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

struct suspend_option {
    uint32_t window_s;
    uint32_t util_centi; /* hundredths of a percent */
    enum suspend_mode mode;
    enum suspend_when when;
    char wake[32];     /* "auto", "hold", or a time as scontrol takes it */
    char signal[12];   /* without SIG; empty: none */
    uint32_t before_s; /* the signal is sent so long before */
};

struct option_limits {
    uint32_t min_window_s;
    uint32_t max_window_s;
    unsigned modes; /* bits 1 << MODE_... */
};

/* What the option means where neither the user nor the site says anything. */
extern const struct suspend_option option_builtin;
extern const struct option_limits option_builtin_limits;

/* Reads TEXT (NULL or empty: just the defaults) over DEFAULTS. False: ERROR has one line that names the value and what is
 * allowed; *OPTION is then not to be used. */
bool option_parse(const char *text, const struct suspend_option *defaults, struct suspend_option *option, char *error,
                  size_t size);

/* False: ERROR says which limit of the site OPTION does not keep. */
bool option_check(const struct suspend_option *option, const struct option_limits *limits, char *error, size_t size);

/* "window=900,util=0,mode=requeue,wake=auto,when=pressure[,signal=USR1@10]". SIZE is at least OPTION_TEXT_BYTES. */
void option_format(const struct suspend_option *option, char *text, size_t size);

/* A time span: 90s 15m 2h 1d, or Slurm's MINUTES, MM:SS, HH:MM:SS, DAYS-HH[:MM[:SS]]. False: none of these, or 0, or more
 * than 366 days. */
bool option_parse_span(const char *text, uint32_t *seconds);

/* "90s", "15m", "2h", "1d": the largest unit that is exact. */
void option_format_span(uint32_t seconds, char *text, size_t size);

/* Index of TEXT among the mode names, -1: none. */
int option_mode(const char *text);

/* Copies at most a line's worth of TEXT, with control characters replaced, so that it can be shown. */
void option_shown(const char *text, char *shown, size_t size);

#endif
