/* The shepherd's command line, written by the plugin. */
#ifndef AFFINODE_SHEPHERD_H
#define AFFINODE_SHEPHERD_H

#include <stdbool.h>
#include <stdint.h>

struct shepherd_options {
    int keeper_fd;
    const char *socket;
    const char *option; /* in the form of option_format() */
    uint32_t job;
    uint32_t restarts;
    uint32_t agent_wait_s;
    bool image;
    char **script; /* ends with NULL */
};

#define SHEPHERD_ARGUMENTS 9 /* with argv[0] and "--" */

/* argv: PROGRAM KEEPER_FD JOB RESTARTS IMAGE AGENT_WAIT SOCKET OPTION -- SCRIPT ARGUMENTS... */
bool shepherd_options(int argc, char **argv, struct shepherd_options *options);

#endif
