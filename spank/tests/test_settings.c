/* The arguments in plugstack.conf: an invalid one is reported and ignored, and the others apply. */
#include "check.h"
#include "settings.h"

/* The plugin never frees its settings. */
const char *__asan_default_options(void) __attribute__((visibility("default"))); // NOLINT: the sanitizer's name
const char *__asan_default_options(void) // NOLINT
{
    return "detect_leaks=0";
}

static char complaints[4096];

static void collect(const char *line)
{
    strncat(complaints, line, sizeof(complaints) - strlen(complaints) - 2);
    strcat(complaints, "\n");
}

static void read_words(struct settings *settings, int count, const char **words)
{
    char *copies[32];

    CHECK(count <= 32);
    complaints[0] = '\0';
    for (int i = 0; i < count; i++)
        copies[i] = strdup(words[i]);
    settings_read(settings, count, copies, collect);
}

static void defaults_apply_without_arguments(void)
{
    struct settings settings;

    read_words(&settings, 0, NULL);
    CHECK_TEXT(complaints, "");
    CHECK(settings.defaults.window_s == 900 && settings.limits.min_window_s == 60 && settings.agent_wait_s == 300);
    CHECK_TEXT(settings.socket, "/run/slurm-affinode/shepherd.sock");
    CHECK(settings_allow_partition(&settings, "any"));
    CHECK(settings.scontrol == NULL && settings.store_count == 0);
}

static void every_argument_is_applied(void)
{
    const char *words[] = {"default=20m,util=2", "min_window=5m",     "max_window=1-0",        "modes=requeue",
                           "partitions=gpu,big", "partitions=extra",  "store=/a",              "store=/b",
                           "shepherd=/s",        "socket=/run/x.sock", "scontrol=/bin/scontrol", "agent_wait=90s",
                           "srun=/opt/x/srun"};
    struct settings settings;
    char list[64];

    read_words(&settings, sizeof(words) / sizeof(*words), words);
    CHECK_TEXT(complaints, "");
    CHECK(settings.defaults.window_s == 1200 && settings.defaults.util_centi == 200);
    CHECK(settings.limits.min_window_s == 300 && settings.limits.max_window_s == 86400);
    CHECK(settings.limits.modes == 1U << MODE_REQUEUE);
    CHECK(settings_allow_partition(&settings, "big") && settings_allow_partition(&settings, "extra"));
    CHECK(!settings_allow_partition(&settings, "cpu") && !settings_allow_partition(&settings, "bi"));
    settings_list_partitions(&settings, list, sizeof(list));
    CHECK_TEXT(list, "gpu, big, extra");
    CHECK(settings.store_count == 2);
    CHECK_TEXT(settings.stores[1], "/b");
    CHECK_TEXT(settings.shepherd, "/s");
    CHECK_TEXT(settings.srun, "/opt/x/srun");
    CHECK_TEXT(settings.scontrol, "/bin/scontrol");
    CHECK(settings.agent_wait_s == 90);
}

static void invalid_argument_is_reported_and_ignored(void)
{
    const char *words[] = {"nonsense",   "min_window=soon", "modes=requeue,fly", "store=relative",
                           "color=red", "default=5m,x=1",  "=",                 "agent_wait=30",
                           "srun=/opt/x/launcher"};
    struct settings settings;

    read_words(&settings, sizeof(words) / sizeof(*words), words);
    CHECK(strstr(complaints, "'nonsense' is ignored: not of the form key=value") != NULL);
    CHECK(strstr(complaints, "'min_window=soon' is ignored: not a time") != NULL);
    CHECK(strstr(complaints, "'modes=requeue,fly' is ignored: allowed are requeue, inplace") != NULL);
    CHECK(strstr(complaints, "'store=relative' is ignored: not an absolute path") != NULL);
    CHECK(strstr(complaints, "'color=red' is ignored: unknown; known are default") != NULL);
    CHECK(strstr(complaints, "'srun=/opt/x/launcher' is ignored: not the path of a program named srun") != NULL);
    CHECK(strstr(complaints, "'default=5m,x=1' is ignored: unknown key 'x'") != NULL);
    CHECK(settings.agent_wait_s == 1800 && settings.limits.min_window_s == 60 && settings.defaults.window_s == 900);
    CHECK(settings.limits.modes == (1U << MODES) - 1U && settings.store_count == 0);
}

static void default_is_adjusted_to_the_limits(void)
{
    const char *words[] = {"min_window=30m", "modes=inplace"};
    const char *fixed[] = {"min_window=30m", "default=10m"};
    struct settings settings;

    read_words(&settings, 2, words);
    CHECK_TEXT(complaints, "");
    CHECK(settings.defaults.window_s == 1800 && settings.defaults.mode == MODE_INPLACE);
    read_words(&settings, 2, fixed);
    CHECK(strstr(complaints, "the default does not keep the limits: window '10m': this site allows 30m to 7d") != NULL);
}

static void too_many_values_are_rejected(void)
{
    const char *words[12];
    char partitions[1024] = "partitions=";
    struct settings settings;

    for (int i = 0; i < 11; i++)
        words[i] = "store=/x";
    for (int i = 0; i < 70; i++)
        strcat(partitions, "p,");
    words[11] = partitions;
    read_words(&settings, 12, words);
    CHECK(settings.store_count == SETTINGS_STORES && settings.partition_count == SETTINGS_PARTITIONS);
    CHECK(strstr(complaints, "more than 8 stores") != NULL && strstr(complaints, "more than 64 partitions") != NULL);
}

int main(void)
{
    defaults_apply_without_arguments();
    every_argument_is_applied();
    invalid_argument_is_reported_and_ignored();
    default_is_adjusted_to_the_limits();
    too_many_values_are_rejected();
    return 0;
}
