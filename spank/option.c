#include "option.h"

#include "number.h"
#include "time_span.h"
#include "wake_time.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TEXT_LONGEST 256
#define SHOWN_BYTES 72
#define LONGEST_NOTICE_S 65535U

const struct suspend_option option_builtin = {
    .window_s = 900,
    .util_centi = 0,
    .mode = MODE_REQUEUE,
    .when = WHEN_PRESSURE,
    .wake = "auto",
    .signal = "",
    .before_s = 0,
    .io_uring = false,
    .steps = STEPS_SLURM,
    .after_loss = AFTER_LOSS_SITE,
};

const struct option_limits option_builtin_limits = {
    .min_window_s = 60,
    .max_window_s = 7 * 86400,
    .modes = (1U << MODES) - 1U,
};

static const char *const mode_names[MODES] = {"requeue", "inplace"};
static const char *const when_names[WHENS] = {"pressure", "always"};
static const char *const io_uring_names[2] = {"deny", "allow"};
static const char *const steps_names[STEPS] = {"slurm", "local"};
static const char *const after_loss_names[AFTER_LOSSES] = {"site", "image", "start", "hold"};

/* The values of signal=. KILL and STOP are missing, as they cannot be caught. */
static const char *const signal_names[] = {"HUP",  "INT",  "QUIT", "ABRT", "USR1", "USR2",  "ALRM",
                                           "TERM", "CONT", "TSTP", "URG",  "WINCH", "IO",   "PWR"};

static const char window_forms[] = "90s, 15m, 2h, or Slurm's MINUTES, MM:SS, HH:MM:SS, DAYS-HH[:MM[:SS]]";

void option_shown(const char *text, char *shown, size_t size)
{
    size_t used = 0;

    while (text[used] != '\0' && used + 4 < size) {
        unsigned char byte = (unsigned char)text[used];

        shown[used++] = (char)(byte < 0x20 || byte == 0x7f ? '?' : byte);
    }
    if (text[used] != '\0') {
        memcpy(shown + used, "...", 3);
        used += 3;
    }
    shown[used] = '\0';
}

static int index_of(const char *text, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(text, names[i]) == 0)
            return (int)i;
    return -1;
}

int option_mode(const char *text)
{
    return index_of(text, mode_names, MODES);
}

/* 0 to 100, at most two decimals, optional percent sign. */
static bool read_percent(const char *text, uint32_t *centi)
{
    uint32_t whole;
    uint32_t scale = 10;

    if (!read_number(&text, &whole) || whole > 100)
        return false;
    *centi = whole * 100;
    if (*text == '.') {
        text++;
        if (!is_digit(*text))
            return false;
        for (; is_digit(*text); text++, scale /= 10) {
            if (scale == 0)
                return false;
            *centi += (uint32_t)(*text - '0') * scale;
        }
    }
    if (*text == '%')
        text++;
    return *text == '\0' && *centi <= 10000;
}

static bool read_signal(char *text, struct suspend_option *option)
{
    char *at = strchr(text, '@');
    const char *number;
    int found;

    if (at == NULL)
        return false;
    *at = '\0';
    number = at + 1;
    if (strncmp(text, "SIG", 3) == 0)
        text += 3;
    found = index_of(text, signal_names, sizeof(signal_names) / sizeof(*signal_names));
    if (found < 0 || !read_number(&number, &option->before_s) || *number != '\0' || option->before_s > LONGEST_NOTICE_S)
        return false;
    snprintf(option->signal, sizeof(option->signal), "%s", signal_names[found]);
    return true;
}

static bool refuse(char *error, size_t size, const char *key, const char *value, const char *allowed)
{
    char shown[SHOWN_BYTES];

    option_shown(value, shown, sizeof(shown));
    snprintf(error, size, "%s '%s': allowed %s", key, shown, allowed);
    return false;
}

enum key { KEY_UTIL, KEY_MODE, KEY_WAKE, KEY_WHEN, KEY_SIGNAL, KEY_IO_URING, KEY_STEPS, KEY_AFTER_LOSS, KEYS };

static const char *const key_names[KEYS] = {"util", "mode", "wake", "when", "signal",
                                              "io_uring", "steps", "after_loss"};

static bool set_key(enum key key, char *value, struct suspend_option *option, char *error, size_t size)
{
    char given[TEXT_LONGEST + 1];
    int found;

    snprintf(given, sizeof(given), "%s", value);
    switch (key) {
    case KEY_UTIL:
        if (read_percent(value, &option->util_centi))
            return true;
        return refuse(error, size, "util", given, "is a percentage from 0 to 100, such as 5 or 2.5");
    case KEY_MODE:
        found = option_mode(value);
        if (found < 0)
            return refuse(error, size, "mode", given, "are requeue, inplace");
        option->mode = (enum suspend_mode)found;
        return true;
    case KEY_WAKE:
        if (!wake_time_is_valid(value) || strlen(value) >= sizeof(option->wake))
            return refuse(error, size, "wake", given,
                          "are auto, hold, or a time: 2h, now+2hours, 18:30, 2030-12-31, 2030-12-31T18:30, midnight, noon, "
                          "tomorrow");
        snprintf(option->wake, sizeof(option->wake), "%s", value);
        return true;
    case KEY_WHEN:
        found = index_of(value, when_names, WHENS);
        if (found < 0)
            return refuse(error, size, "when", given, "are pressure, always");
        option->when = (enum suspend_when)found;
        return true;
    case KEY_SIGNAL:
        if (read_signal(value, option))
            return true;
        return refuse(error, size, "signal", given,
                      "is NAME@SECONDS, such as USR1@60: a signal that can be caught, 0 to 65535 seconds");
    case KEY_IO_URING:
        found = index_of(value, io_uring_names, 2);
        if (found < 0)
            return refuse(error, size, "io_uring", given, "are deny, allow");
        option->io_uring = found == 1;
        return true;
    case KEY_STEPS:
        found = index_of(value, steps_names, STEPS);
        if (found < 0)
            return refuse(error, size, "steps", given, "are slurm, local");
        option->steps = (enum suspend_steps)found;
        return true;
    case KEY_AFTER_LOSS:
        found = index_of(value, after_loss_names, AFTER_LOSSES);
        if (found < 0)
            return refuse(error, size, "after_loss", given, "are image, start, hold, site");
        option->after_loss = (enum suspend_after_loss)found;
        return true;
    case KEYS:
        break;
    }
    return false;
}

static bool parse_pair(char *item, unsigned *given, struct suspend_option *option, char *error, size_t size)
{
    char *equals = strchr(item, '=');
    int key;

    if (equals != NULL)
        *equals = '\0';
    key = index_of(item, key_names, KEYS);
    if (key < 0)
        return refuse(error, size, "unknown key", item,
                      "are util=, mode=, wake=, when=, signal=, io_uring=, steps=, after_loss= after WINDOW");
    if (equals == NULL || equals[1] == '\0') {
        snprintf(error, size, "%s has no value: write %s=VALUE", key_names[key], key_names[key]);
        return false;
    }
    if (*given & (1U << key)) {
        snprintf(error, size, "%s is given twice: once is allowed", key_names[key]);
        return false;
    }
    *given |= 1U << key;
    return set_key((enum key)key, equals + 1, option, error, size);
}

bool option_parse(const char *text, const struct suspend_option *defaults, struct suspend_option *option, char *error,
                  size_t size)
{
    char copy[TEXT_LONGEST + 1];
    char *item = copy;
    char *next;
    unsigned given = 0;

    *option = *defaults;
    if (text == NULL || *text == '\0')
        return true;
    if (strlen(text) > TEXT_LONGEST)
        return refuse(error, size, "value", text, "are 256 characters at most");
    snprintf(copy, sizeof(copy), "%s", text);
    next = strchr(item, ',');
    if (next != NULL)
        *next++ = '\0';
    if (strchr(item, '=') != NULL || *item == '\0')
        return refuse(error, size, "no WINDOW before", text, "is WINDOW[,key=value...], such as 15m,util=5");
    if (!time_span_parse(item, &option->window_s))
        return refuse(error, size, "window", item, window_forms);
    while (next != NULL) {
        item = next;
        next = strchr(item, ',');
        if (next != NULL)
            *next++ = '\0';
        if (!parse_pair(item, &given, option, error, size))
            return false;
    }
    return true;
}

bool option_check(const struct suspend_option *option, const struct option_limits *limits, char *error, size_t size)
{
    char window[16];
    char least[16];
    char most[16];
    size_t used;

    if (option->window_s < limits->min_window_s || option->window_s > limits->max_window_s) {
        time_span_format(option->window_s, window, sizeof(window));
        time_span_format(limits->min_window_s, least, sizeof(least));
        time_span_format(limits->max_window_s, most, sizeof(most));
        snprintf(error, size, "window '%s': this site allows %s to %s", window, least, most);
        return false;
    }
    if ((limits->modes & (1U << option->mode)) == 0) {
        snprintf(error, size, "mode '%s': this site allows", mode_names[option->mode]);
        for (int mode = 0; mode < MODES; mode++) {
            used = strlen(error);
            if (limits->modes & (1U << mode))
                snprintf(error + used, size - used, " %s", mode_names[mode]);
        }
        return false;
    }
    return true;
}

void option_format(const struct suspend_option *option, char *text, size_t size)
{
    uint32_t rest = option->util_centi % 100;
    char util[16];
    size_t used;

    snprintf(util, sizeof(util), "%" PRIu32, option->util_centi / 100);
    if (rest != 0)
        snprintf(util, sizeof(util), "%" PRIu32 ".%02" PRIu32, option->util_centi / 100, rest);
    snprintf(text, size, "window=%" PRIu32 ",util=%s,mode=%s,wake=%s,when=%s", option->window_s, util,
             mode_names[option->mode], option->wake, when_names[option->when]);
    used = strlen(text);
    if (option->signal[0] != '\0')
        snprintf(text + used, size - used, ",signal=%s@%" PRIu32, option->signal, option->before_s);
    used = strlen(text);
    if (option->steps != STEPS_SLURM) /* an agent of an earlier version does not know the key */
        snprintf(text + used, size - used, ",steps=%s", steps_names[option->steps]);
    used = strlen(text);
    if (option->after_loss != AFTER_LOSS_SITE)
        snprintf(text + used, size - used, ",after_loss=%s", after_loss_names[option->after_loss]);
}
