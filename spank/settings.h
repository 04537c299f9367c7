/* The plugin's arguments in plugstack.conf, of the form key=value. */
#ifndef AFFINODE_SETTINGS_H
#define AFFINODE_SETTINGS_H

#include "option.h"

#define SETTINGS_STORES 8
#define SETTINGS_PARTITIONS 64

struct settings {
    struct suspend_option defaults;          /* default= */
    bool has_default;
    struct option_limits limits;             /* min_window= max_window= modes= */
    char *partitions[SETTINGS_PARTITIONS];   /* partitions=; none: all partitions are allowed */
    int partition_count;
    const char *stores[SETTINGS_STORES];     /* store=, may be repeated */
    int store_count;
    const char *shepherd;                    /* shepherd= */
    const char *srun;                        /* srun=: the launcher of local steps */
    const char *socket;                      /* socket= */
    const char *scontrol;                    /* scontrol= */
    uint32_t agent_wait_s;                   /* agent_wait= */
};

typedef void settings_complain(const char *line);

/* Parses the arguments. Reports an invalid one to COMPLAIN and ignores it. The settings point to the strings of ARGV. */
void settings_read(struct settings *settings, int argc, char **argv, settings_complain *complain);

bool settings_allow_partition(const struct settings *settings, const char *partition);

/* Lists the allowed partitions, separated by commas. */
void settings_list_partitions(const struct settings *settings, char *text, size_t size);

#endif
