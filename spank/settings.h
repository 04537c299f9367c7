/* What the site says in plugstack.conf behind the plugin's path: words of the form key=value. */
#ifndef AFFINODE_SETTINGS_H
#define AFFINODE_SETTINGS_H

#include "option.h"

#define SETTINGS_STORES 8
#define SETTINGS_PARTITIONS 64

struct settings {
    struct suspend_option defaults;          /* default= */
    bool has_default;
    struct option_limits limits;             /* min_window= max_window= modes= */
    char *partitions[SETTINGS_PARTITIONS];   /* partitions=, all where there is none */
    int partition_count;
    const char *stores[SETTINGS_STORES];     /* store=, may be repeated */
    int store_count;
    const char *shepherd;                    /* shepherd= */
    const char *socket;                      /* socket= */
    const char *scontrol;                    /* scontrol= */
    uint32_t agent_wait_s;                   /* agent_wait= */
};

typedef void settings_complain(const char *line);

/* Reads the words. One that is wrong is complained about and left out: the others hold. The strings of ARGV are kept. */
void settings_read(struct settings *settings, int argc, char **argv, settings_complain *complain);

bool settings_allow_partition(const struct settings *settings, const char *partition);

/* The partitions that are allowed, joined by commas. */
void settings_list_partitions(const struct settings *settings, char *text, size_t size);

#endif
