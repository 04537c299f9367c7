#include "settings.h"

#include "time_span.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef SHEPHERD
#define SHEPHERD "/usr/local/libexec/slurm-affinode-shepherd"
#endif
#ifndef LAUNCHER
#define LAUNCHER "/usr/local/libexec/slurm-affinode-steps/srun"
#endif
#define SOCKET "/run/slurm-affinode/shepherd.sock"
#define LONGEST_SOCKET 107 /* sun_path without the final NUL */

static bool set_default(struct settings *settings, const char *value, char *error, size_t size)
{
    struct suspend_option option;

    if (!option_parse(value, &option_builtin, &option, error, size))
        return false;
    settings->defaults = option;
    settings->has_default = true;
    return true;
}

/* Without default= the built-in default is adjusted to the limits of the site. */
static void fit_default(struct settings *settings)
{
    struct suspend_option *option = &settings->defaults;

    if (option->window_s < settings->limits.min_window_s)
        option->window_s = settings->limits.min_window_s;
    if (option->window_s > settings->limits.max_window_s)
        option->window_s = settings->limits.max_window_s;
    if ((settings->limits.modes & (1U << option->mode)) == 0)
        option->mode = MODE_INPLACE;
}

static bool set_span(uint32_t *span, const char *value, char *error, size_t size)
{
    if (time_span_parse(value, span))
        return true;
    snprintf(error, size, "not a time such as 90s, 15m, 2h");
    return false;
}

static bool set_modes(struct settings *settings, const char *value, char *error, size_t size)
{
    char *copy = strdup(value);
    char *rest = copy;
    const char *name;
    unsigned modes = 0;

    while (copy != NULL && (name = strsep(&rest, ",")) != NULL) {
        int mode = option_mode(name);

        if (mode < 0) {
            modes = 0;
            break;
        }
        modes |= 1U << mode;
    }
    free(copy);
    if (modes == 0) {
        snprintf(error, size, "allowed are requeue, inplace, or both");
        return false;
    }
    settings->limits.modes = modes;
    return true;
}

static bool set_partitions(struct settings *settings, const char *value, char *error, size_t size)
{
    while (*value != '\0') {
        size_t length = strcspn(value, ",");

        if (settings->partition_count == SETTINGS_PARTITIONS) {
            snprintf(error, size, "more than %d partitions", SETTINGS_PARTITIONS);
            return false;
        }
        /* Never freed: used as long as the plugin is loaded. */
        if (length > 0 && (settings->partitions[settings->partition_count] = strndup(value, length)) != NULL)
            settings->partition_count++;
        value += length;
        value += *value == ',';
    }
    return true;
}

static bool set_path(const char **path, const char *value, size_t longest, char *error, size_t size)
{
    if (*value != '/' || strlen(value) > longest) {
        snprintf(error, size, "not an absolute path of at most %zu characters", longest);
        return false;
    }
    *path = value;
    return true;
}

/* The script calls it as srun. */
static bool set_launcher(const char **path, const char *value, char *error, size_t size)
{
    const char *slash = strrchr(value, '/');

    if (slash != NULL && slash != value && strcmp(slash, "/srun") == 0)
        return set_path(path, value, 4000, error, size);
    snprintf(error, size, "not the path of a program named srun");
    return false;
}

static bool set_one(struct settings *settings, const char *key, const char *value, char *error, size_t size)
{
    if (strcmp(key, "default") == 0)
        return set_default(settings, value, error, size);
    if (strcmp(key, "min_window") == 0)
        return set_span(&settings->limits.min_window_s, value, error, size);
    if (strcmp(key, "max_window") == 0)
        return set_span(&settings->limits.max_window_s, value, error, size);
    if (strcmp(key, "modes") == 0)
        return set_modes(settings, value, error, size);
    if (strcmp(key, "partitions") == 0)
        return set_partitions(settings, value, error, size);
    if (strcmp(key, "shepherd") == 0)
        return set_path(&settings->shepherd, value, 4000, error, size);
    if (strcmp(key, "srun") == 0)
        return set_launcher(&settings->srun, value, error, size);
    if (strcmp(key, "scontrol") == 0)
        return set_path(&settings->scontrol, value, 4000, error, size);
    if (strcmp(key, "socket") == 0)
        return set_path(&settings->socket, value, LONGEST_SOCKET, error, size);
    if (strcmp(key, "agent_wait") == 0)
        return set_span(&settings->agent_wait_s, value, error, size);
    if (strcmp(key, "store") == 0) {
        if (settings->store_count == SETTINGS_STORES) {
            snprintf(error, size, "more than %d stores", SETTINGS_STORES);
            return false;
        }
        if (!set_path(&settings->stores[settings->store_count], value, 4000, error, size))
            return false;
        settings->store_count++;
        return true;
    }
    snprintf(error, size, "unknown; known are default, min_window, max_window, modes, partitions, store, shepherd, socket, "
                          "scontrol, srun, agent_wait");
    return false;
}

void settings_read(struct settings *settings, int argc, char **argv, settings_complain *complain)
{
    char error[OPTION_ERROR_BYTES];
    char line[OPTION_ERROR_BYTES + 128];
    char shown[96];
    char key[24];

    *settings = (struct settings){.defaults = option_builtin,
                                  .limits = option_builtin_limits,
                                  .shepherd = SHEPHERD,
                                  .srun = LAUNCHER,
                                  .socket = SOCKET,
                                  .agent_wait_s = 300};
    for (int i = 0; i < argc; i++) {
        const char *equals = strchr(argv[i], '=');
        size_t length = equals == NULL ? 0 : (size_t)(equals - argv[i]);

        snprintf(error, sizeof(error), "not of the form key=value");
        if (equals != NULL && length < sizeof(key)) {
            memcpy(key, argv[i], length);
            key[length] = '\0';
            if (set_one(settings, key, equals + 1, error, sizeof(error)))
                continue;
        }
        option_shown(argv[i], shown, sizeof(shown));
        snprintf(line, sizeof(line), "plugstack.conf: '%s' is ignored: %s", shown, error);
        complain(line);
    }
    if (!settings->has_default)
        fit_default(settings);
    if (!option_check(&settings->defaults, &settings->limits, error, sizeof(error))) {
        snprintf(line, sizeof(line), "plugstack.conf: the default does not keep the limits: %s", error);
        complain(line);
    }
}

bool settings_allow_partition(const struct settings *settings, const char *partition)
{
    for (int i = 0; i < settings->partition_count; i++)
        if (strcmp(settings->partitions[i], partition) == 0)
            return true;
    return settings->partition_count == 0;
}

void settings_list_partitions(const struct settings *settings, char *text, size_t size)
{
    size_t used = 0;

    text[0] = '\0';
    for (int i = 0; i < settings->partition_count && used < size; i++) {
        snprintf(text + used, size - used, "%s%s", i > 0 ? ", " : "", settings->partitions[i]);
        used = strlen(text);
    }
}
