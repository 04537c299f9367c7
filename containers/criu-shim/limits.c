#include "limits.h"

#include <stdlib.h>
#include <string.h>

struct named_limit {
	int resource;
	const char *name;
};

/* As the kernel prints them (fs/proc/base.c, lnames). */
static const struct named_limit names[] = {
	{ RLIMIT_CPU, "Max cpu time" },
	{ RLIMIT_FSIZE, "Max file size" },
	{ RLIMIT_DATA, "Max data size" },
	{ RLIMIT_STACK, "Max stack size" },
	{ RLIMIT_CORE, "Max core file size" },
	{ RLIMIT_RSS, "Max resident set" },
	{ RLIMIT_NPROC, "Max processes" },
	{ RLIMIT_NOFILE, "Max open files" },
	{ RLIMIT_MEMLOCK, "Max locked memory" },
	{ RLIMIT_AS, "Max address space" },
	{ RLIMIT_LOCKS, "Max file locks" },
	{ RLIMIT_SIGPENDING, "Max pending signals" },
	{ RLIMIT_MSGQUEUE, "Max msgqueue size" },
	{ RLIMIT_NICE, "Max nice priority" },
	{ RLIMIT_RTPRIO, "Max realtime priority" },
	{ RLIMIT_RTTIME, "Max realtime timeout" },
};

static const char *name_of(int resource)
{
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (names[i].resource == resource)
			return names[i].name;
	return NULL;
}

static int parse_value(const char **text, rlim_t *value)
{
	static const char unlimited[] = "unlimited";
	const char *at = *text + strspn(*text, " ");
	char *end;

	if (strncmp(at, unlimited, sizeof(unlimited) - 1) == 0) {
		*value = RLIM_INFINITY;
		*text = at + sizeof(unlimited) - 1;
		return 0;
	}
	*value = strtoull(at, &end, 10);
	if (end == at)
		return -1;
	*text = end;
	return 0;
}

int shim_parse_limits(FILE *file, int resource, struct rlimit *limit)
{
	const char *name = name_of(resource);
	char line[256];

	if (!name)
		return -1;
	while (fgets(line, sizeof(line), file)) {
		const size_t length = strlen(name);

		if (strncmp(line, name, length) != 0 || line[length] != ' ')
			continue;
		const char *at = line + length;
		struct rlimit found;

		if (parse_value(&at, &found.rlim_cur) != 0 || parse_value(&at, &found.rlim_max) != 0)
			return -1;
		*limit = found;
		return 0;
	}
	return -1;
}

int shim_read_limit(pid_t pid, int resource, struct rlimit *limit)
{
	char path[64];
	int result;

	if (pid == 0)
		snprintf(path, sizeof(path), "/proc/self/limits");
	else
		snprintf(path, sizeof(path), "/proc/%d/limits", (int)pid);
	FILE *file = fopen(path, "re");
	if (!file)
		return -1;
	result = shim_parse_limits(file, resource, limit);
	fclose(file);
	return result;
}
