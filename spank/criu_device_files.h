/* What the tests use of the CRIU plugin. */
#ifndef AFFINODE_CRIU_DEVICE_FILES_H
#define AFFINODE_CRIU_DEVICE_FILES_H

#include <stdbool.h>
#include <stdint.h>

#define MAJORS_VARIABLE "SLURM_AFFINODE_DEVICE_MAJORS" /* such as 195,507 */

#define CLOSED_VARIABLE "SLURM_AFFINODE_CLOSED_SOCKETS" /* inodes, such as 71234,71240 */

/* Whether a list of inodes has this one. What follows a malformed number is ignored. */
bool is_closed_socket(const char *inodes, uint32_t wanted);

/* Whether a list such as "195,507" has the number. What follows a malformed number is ignored. */
bool is_listed(const char *majors, uint32_t wanted);

#endif
