/* Fuzzes the parsers of untrusted input: fuzz TARGET COUNT SEED [ONLY]. Prints how many inputs were rejected and accepted.
 *
 * Inputs are mutations of valid ones, each in a buffer of exactly its size, so that AddressSanitizer detects every read
 * beyond its end. libFuzzer is not needed, and the same seed gives the same inputs. */
#include "cgroup.h"
#include "channel.h"
#include "message.h"
#include "option.h"
#include "settings.h"
#include "shepherd.h"
#include "time_span.h"
#include "wake_time.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LONGEST 8192
#define HOLDS(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "does not hold: %s\n", #condition);                                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

struct input {
    char bytes[LONGEST];
    size_t length;
};

static uint64_t state;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static size_t below(size_t most)
{
    return (size_t)(draw() % most);
}

static void begin(uint64_t seed, uint64_t index)
{
    state = (seed << 40) + index * UINT64_C(0x9E3779B97F4A7C15) + 1;
    for (int i = 0; i < 8; i++)
        draw();
}

static const char *const words[] = {"\n",  "=",    ",",     ":",      "::",  "/",          "0",    "-1",  "4294967296", "99999999999999999999",
                                    "\r",  "\x7f", "\xff",  " - ",    "\\040", "\\377",    "now+", "T",   "@",          "SIG",
                                    "15m", "util", "mode=", "signal", "say", "restored\n", "pid=", "%s%n", "\t",         "number=64",
                                    "1-",  "..",   "cgroup2", "text=", "window", "default=", "modes=", "cpu,", "start", "hold"};

static void replace(struct input *input, size_t at, size_t removed, const char *put, size_t length)
{
    if (removed > input->length - at)
        removed = input->length - at;
    if (input->length - removed + length > LONGEST)
        return;
    memmove(input->bytes + at + length, input->bytes + at + removed, input->length - at - removed);
    memcpy(input->bytes + at, put, length);
    input->length = input->length - removed + length;
}

static void mutate(struct input *input)
{
    static const int changes[] = {0, 1, 1, 1, 2, 2, 4, 8};

    for (int left = changes[below(8)]; left > 0; left--) {
        size_t at = below(input->length + 1);
        char copy[256];
        size_t length;
        char byte = (char)draw();
        const char *word;

        switch (below(6)) {
        case 0:
            replace(input, at, 1, &byte, 1);
            break;
        case 1:
            replace(input, at, 0, &byte, 1);
            break;
        case 2:
            replace(input, at, 1 + below(8), "", 0);
            break;
        case 3:
            length = input->length - at < sizeof(copy) ? input->length - at : sizeof(copy);
            memcpy(copy, input->bytes + at, length);
            for (size_t times = 1 + below(40); times > 0; times--)
                replace(input, at, 0, copy, length);
            break;
        case 4:
            input->length = at;
            break;
        default:
            word = words[below(sizeof(words) / sizeof(*words))];
            replace(input, at, below(3), word, strlen(word));
        }
    }
}

/* Returns the input as a string, in a buffer of its own size. */
static char *as_text(const struct input *input)
{
    char *text = malloc(input->length + 1);

    HOLDS(text != NULL);
    memcpy(text, input->bytes, input->length);
    text[input->length] = '\0';
    return text;
}

static bool is_line(const char *text, size_t size)
{
    size_t length = strnlen(text, size);

    for (size_t i = 0; i < length; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            return false;
    return length < size;
}

static bool try_message(const struct input *input)
{
    char *packet = malloc(input->length > 0 ? input->length : 1);
    struct message message;
    bool good;

    HOLDS(packet != NULL);
    memcpy(packet, input->bytes, input->length);
    good = message_parse(packet, input->length, &message);
    free(packet);
    if (good) {
        HOLDS(is_line(message.text, sizeof(message.text)));
        HOLDS(message.verb != VERB_RESTORED || message.pid > 1);
        HOLDS(message.verb != VERB_SIGNAL || (message.number > 0 && message.number <= 64));
    }
    return good;
}

static bool try_option(const struct input *input)
{
    char *text = as_text(input);
    char error[OPTION_ERROR_BYTES] = "";
    char formatted[OPTION_TEXT_BYTES];
    char span[16];
    struct suspend_option option;
    uint32_t seconds;
    bool good = option_parse(text, &option_builtin, &option, error, sizeof(error));

    wake_time_is_valid(text);
    if (time_span_parse(text, &seconds)) {
        HOLDS(seconds > 0 && seconds <= 366 * 86400);
        time_span_format(seconds, span, sizeof(span));
        /* the formatted span is parsed again, unless it has more digits than the parser accepts */
        HOLDS(seconds >= 10000000 || (time_span_parse(span, &option.before_s) && option.before_s == seconds));
        option.before_s = 0;
    }
    if (good) {
        HOLDS(option.window_s > 0 && option.util_centi <= 10000 && wake_time_is_valid(option.wake));
        option_format(&option, formatted, sizeof(formatted));
        HOLDS(strlen(formatted) < sizeof(formatted) - 1 && is_line(formatted, sizeof(formatted)));
        option_check(&option, &option_builtin_limits, error, sizeof(error));
    } else {
        HOLDS(error[0] != '\0' && is_line(error, sizeof(error)));
    }
    free(text);
    return good;
}

static bool count_path(const char *path, void *context)
{
    size_t *count = context;

    HOLDS(strlen(path) > strlen("/cgroup.procs") - 1 && strcmp(path + strlen(path) - strlen("/cgroup.procs"), "/cgroup.procs") == 0);
    (*count)++;
    return *count < 100;
}

/* The first half is /proc/PID/cgroup, the second one mountinfo. */
static bool try_cgroup(const struct input *input)
{
    char *text = as_text(input);
    char *mounts = strstr(text, "\n\n");
    size_t count = 0;
    bool good;

    if (mounts != NULL) {
        char *second = strdup(mounts + 2);

        HOLDS(second != NULL);
        mounts[1] = '\0';
        good = cgroup_each_procs(text, second, count_path, &count);
        free(second);
    } else {
        char empty[1] = "";

        good = cgroup_each_procs(text, empty, count_path, &count);
        HOLDS(!good);
    }
    free(text);
    return good;
}

static void ignore(const char *line)
{
    HOLDS(is_line(line, OPTION_ERROR_BYTES + 128));
}

static bool try_settings(const struct input *input)
{
    char *text = as_text(input);
    char *argv[32];
    int argc = 0;
    char *rest = text;
    char *word;
    char list[512];
    struct settings settings;
    bool good;

    while (argc < 32 && (word = strsep(&rest, " \n")) != NULL)
        argv[argc++] = word;
    settings_read(&settings, argc, argv, ignore);
    settings_list_partitions(&settings, list, sizeof(list));
    settings_allow_partition(&settings, "gpu");
    good = settings.has_default;
    for (int i = 0; i < settings.partition_count; i++)
        free(settings.partitions[i]);
    free(text);
    return good;
}

static bool try_arguments(const struct input *input)
{
    char *text = as_text(input);
    char *argv[24];
    int argc = 0;
    char *rest = text;
    char *word;
    struct shepherd_options options = {0};
    bool good;

    while (argc < 23 && (word = strsep(&rest, " ")) != NULL)
        argv[argc++] = word;
    argv[argc] = NULL;
    good = shepherd_options(argc, argv, &options);
    HOLDS(!good || (options.script != NULL && options.script[0] != NULL && options.keeper_fd >= 0));
    free(text);
    return good;
}

static bool try_channel(const struct input *input)
{
    struct packet packet;
    int pair[2];
    int got;

    HOLDS(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    if (input->length > 0)
        send(pair[0], input->bytes, input->length, MSG_DONTWAIT | MSG_NOSIGNAL);
    close(pair[0]);
    got = channel_receive(pair[1], &packet, 1000);
    HOLDS(got == -1 || (got == 1 && input->length == sizeof(packet)));
    close(pair[1]);
    return got == 1;
}

enum { MOST_SEEDS = 7 };

static const char packet_bytes[sizeof(struct packet)] = {0};

static const struct {
    const char *name;
    bool (*attempt)(const struct input *input);
    const char *seeds[MOST_SEEDS];
} targets[] = {
    {"message", try_message, {"start\nrestore_failed=1", "restored\npid=17", "wait\nfresh=1", "wait\nreports=1", "hold\nreason=a b", "say\ntext=x", "signal\nnumber=18"}},
    {"option", try_option, {"15m,util=2.5,mode=requeue,wake=auto,when=always,signal=USR1@60", "1-02:03:04", "90s,wake=2030-12-31T18:30", "2h,wake=now+2hours", "10:00,wake=18:30", "now+7days"}},
    {"cgroup", try_cgroup, {"0::/system.slice/slurmstepd.scope/job_7\n\n22 1 0:20 / / rw - ext4 /dev/vda rw\n30 22 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
                            "12:cpu,cpuacct:/slurm/uid_1/job_7\n1:name=systemd:/s\n\n31 22 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n32 22 0:29 /slurm /sys/fs/cgroup/cpu\\040x rw - cgroup cgroup rw,cpu,cpuacct\n"}},
    {"settings", try_settings, {"default=15m,mode=inplace min_window=60s max_window=7d modes=requeue,inplace partitions=gpu,a100 shepherd=/x socket=/run/x.sock scontrol=/usr/bin/scontrol agent_wait=300", "store=/srv/images partitions=a,b,c"}},
    {"arguments", try_arguments, {"shepherd 5 7 0 1 300 /run/x.sock window=900 -- /bin/sh script", "shepherd 5 7 0 1 300 x y --"}},
    {"channel", try_channel, {packet_bytes}},
};

int main(int argc, char **argv)
{
    size_t chosen = sizeof(targets) / sizeof(*targets);
    uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    uint64_t first = argc > 4 ? strtoull(argv[4], NULL, 10) : 0;
    uint64_t refused = 0;
    uint64_t accepted = 0;
    static struct input input;

    for (size_t i = 0; argc > 3 && i < sizeof(targets) / sizeof(*targets); i++)
        if (strcmp(targets[i].name, argv[1]) == 0)
            chosen = i;
    if (chosen == sizeof(targets) / sizeof(*targets)) {
        fprintf(stderr, "usage: fuzz TARGET COUNT SEED [ONLY]\n");
        return 2;
    }
    if (argc > 4)
        count = first + 1;
    for (uint64_t index = first; index < count; index++) {
        size_t seeds = 0;
        const char *text;

        begin(seed, index);
        while (seeds < MOST_SEEDS && targets[chosen].seeds[seeds] != NULL)
            seeds++;
        text = targets[chosen].seeds[below(seeds)];
        input.length = text == packet_bytes ? sizeof(packet_bytes) : strlen(text);
        memcpy(input.bytes, text, input.length);
        mutate(&input);
        if (index % 1024 == 0) {
            alarm(60); /* ends the fuzzer if an input hangs */
            fprintf(stderr, "at %llu\n", (unsigned long long)index);
        }
        if (targets[chosen].attempt(&input))
            accepted++;
        else
            refused++;
    }
    printf("%llu %llu\n", (unsigned long long)refused, (unsigned long long)accepted);
    return 0;
}
