/* The shim reads the same limits as the kernel reports. */
#define _GNU_SOURCE
#include "limits.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int failures;

static void check(int good, const char *what)
{
	if (good)
		return;
	fprintf(stderr, "failed: %s\n", what);
	failures++;
}

static void own_limits_are_equal(void)
{
	for (int resource = 0; resource < (int)RLIM_NLIMITS; resource++) {
		struct rlimit kernel, shim;
		char what[64];

		getrlimit((__rlimit_resource_t)resource, &kernel);
		snprintf(what, sizeof(what), "resource %d equals getrlimit", resource);
		check(shim_read_limit(getpid(), resource, &shim) == 0 && kernel.rlim_cur == shim.rlim_cur &&
			      kernel.rlim_max == shim.rlim_max,
		      what);
	}
}

static void bad_files_are_refused(void)
{
	static char truncated[] = "Limit  Soft Limit\nMax cpu time   unlimited\n";
	struct rlimit limit = { 1, 2 };
	FILE *file = fmemopen(truncated, strlen(truncated), "r");

	check(shim_parse_limits(file, RLIMIT_CPU, &limit) == -1, "a line without its hard limit is refused");
	check(limit.rlim_cur == 1 && limit.rlim_max == 2, "a refusal leaves the caller's value alone");
	rewind(file);
	check(shim_parse_limits(file, 99, &limit) == -1, "an unknown resource is refused");
	fclose(file);
	check(shim_read_limit(-1, RLIMIT_CPU, &limit) == -1, "no such process");
}

int main(void)
{
	own_limits_are_equal();
	bad_files_are_refused();
	return failures != 0;
}
