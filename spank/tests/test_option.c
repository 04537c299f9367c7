/* The grammar of --gpu-suspend-idle: accepted and rejected values, their messages, and random input. */
#include "check.h"
#include "option.h"

static const struct {
    const char *given;
    const char *found;
} valid[] = {
    {NULL, "window=900,util=0,mode=requeue,wake=auto,when=pressure"},
    {"", "window=900,util=0,mode=requeue,wake=auto,when=pressure"},
    {"90s", "window=90,util=0,mode=requeue,wake=auto,when=pressure"},
    {"15m", "window=900,util=0,mode=requeue,wake=auto,when=pressure"},
    {"2h", "window=7200,util=0,mode=requeue,wake=auto,when=pressure"},
    {"1d", "window=86400,util=0,mode=requeue,wake=auto,when=pressure"},
    {"20", "window=1200,util=0,mode=requeue,wake=auto,when=pressure"},
    {"2:30", "window=150,util=0,mode=requeue,wake=auto,when=pressure"},
    {"0:45", "window=45,util=0,mode=requeue,wake=auto,when=pressure"},
    {"01:02:03", "window=3723,util=0,mode=requeue,wake=auto,when=pressure"},
    {"1-2", "window=93600,util=0,mode=requeue,wake=auto,when=pressure"},
    {"1-2:03", "window=93780,util=0,mode=requeue,wake=auto,when=pressure"},
    {"1-02:03:04", "window=93784,util=0,mode=requeue,wake=auto,when=pressure"},
    {"0-00:00:30", "window=30,util=0,mode=requeue,wake=auto,when=pressure"},
    {"15m,util=5", "window=900,util=5,mode=requeue,wake=auto,when=pressure"},
    {"15m,util=2.5%", "window=900,util=2.50,mode=requeue,wake=auto,when=pressure"},
    {"15m,util=0.05", "window=900,util=0.05,mode=requeue,wake=auto,when=pressure"},
    {"15m,util=100", "window=900,util=100,mode=requeue,wake=auto,when=pressure"},
    {"15m,mode=inplace", "window=900,util=0,mode=inplace,wake=auto,when=pressure"},
    {"15m,wake=hold,when=always", "window=900,util=0,mode=requeue,wake=hold,when=always"},
    {"15m,wake=now+2hours", "window=900,util=0,mode=requeue,wake=now+2hours,when=pressure"},
    {"15m,wake=now+90", "window=900,util=0,mode=requeue,wake=now+90,when=pressure"},
    {"15m,wake=2h", "window=900,util=0,mode=requeue,wake=2h,when=pressure"},
    {"15m,wake=90s", "window=900,util=0,mode=requeue,wake=90s,when=pressure"},
    {"15m,wake=9:30", "window=900,util=0,mode=requeue,wake=9:30,when=pressure"},
    {"15m,wake=2028-02-29", "window=900,util=0,mode=requeue,wake=2028-02-29,when=pressure"},
    {"15m,wake=18:30", "window=900,util=0,mode=requeue,wake=18:30,when=pressure"},
    {"15m,wake=2030-12-31", "window=900,util=0,mode=requeue,wake=2030-12-31,when=pressure"},
    {"15m,wake=2030-12-31T18:30:05", "window=900,util=0,mode=requeue,wake=2030-12-31T18:30:05,when=pressure"},
    {"15m,wake=midnight", "window=900,util=0,mode=requeue,wake=midnight,when=pressure"},
    {"15m,signal=USR1@60", "window=900,util=0,mode=requeue,wake=auto,when=pressure,signal=USR1@60"},
    {"15m,io_uring=allow", "window=900,util=0,mode=requeue,wake=auto,when=pressure"},
    {"15m,signal=SIGTERM@0", "window=900,util=0,mode=requeue,wake=auto,when=pressure,signal=TERM@0"},
    {"15m,steps=slurm", "window=900,util=0,mode=requeue,wake=auto,when=pressure"},
    {"15m,steps=local", "window=900,util=0,mode=requeue,wake=auto,when=pressure,steps=local"},
    {"15m,after_loss=site", "window=900,util=0,mode=requeue,wake=auto,when=pressure"},
    {"15m,after_loss=image", "window=900,util=0,mode=requeue,wake=auto,when=pressure,after_loss=image"},
    {"15m,after_loss=start", "window=900,util=0,mode=requeue,wake=auto,when=pressure,after_loss=start"},
    {"15m,after_loss=hold,steps=local",
     "window=900,util=0,mode=requeue,wake=auto,when=pressure,steps=local,after_loss=hold"},
    {"15m,steps=local,signal=USR1@60", "window=900,util=0,mode=requeue,wake=auto,when=pressure,signal=USR1@60,steps=local"},
    {"1h,when=always,signal=USR2@5,util=1,wake=auto,mode=requeue",
     "window=3600,util=1,mode=requeue,wake=auto,when=always,signal=USR2@5"},
};

static const char windows[] = ": allowed 90s, 15m, 2h, or Slurm's MINUTES, MM:SS, HH:MM:SS, DAYS-HH[:MM[:SS]]";
static const char keys[] = ": allowed are util=, mode=, wake=, when=, signal=, io_uring=, steps=, after_loss= after WINDOW";
static const char wakes[] = ": allowed are auto, hold, or a time: 2h, now+2hours, 18:30, 2030-12-31, 2030-12-31T18:30, "
                            "midnight, noon, tomorrow";
static const char percentages[] = ": allowed is a percentage from 0 to 100, such as 5 or 2.5";
static const char signals[] = ": allowed is NAME@SECONDS, such as USR1@60: a signal that can be caught, 0 to 65535 seconds";
static const char forms[] = ": allowed is WINDOW[,key=value...], such as 15m,util=5";

static const struct {
    const char *given;
    const char *said;
    const char *allowed;
} refused[] = {
    {"abc", "window 'abc'", windows},
    {"0", "window '0'", windows},
    {"0s", "window '0s'", windows},
    {"-5m", "window '-5m'", windows},
    {"5x", "window '5x'", windows},
    {"5M", "window '5M'", windows},
    {"1.5h", "window '1.5h'", windows},
    {"1h30m", "window '1h30m'", windows},
    {" 5m", "window ' 5m'", windows},
    {"5m ", "window '5m '", windows},
    {"1:2:3:4", "window '1:2:3:4'", windows},
    {"1-", "window '1-'", windows},
    {"1-2-3", "window '1-2-3'", windows},
    {":5", "window ':5'", windows},
    {"5:", "window '5:'", windows},
    {"400d", "window '400d'", windows},
    {"99999999s", "window '99999999s'", windows},
    {"18446744073709551617", "window '18446744073709551617'", windows},
    {"UNLIMITED", "window 'UNLIMITED'", windows},
    {"m", "window 'm'", windows},
    {"\n", "window '?'", windows},
    {"util=5", "no WINDOW before 'util=5'", forms},
    {",util=5", "no WINDOW before ',util=5'", forms},
    {"15m,", "unknown key ''", keys},
    {"15m,,util=5", "unknown key ''", keys},
    {"15m,foo=1", "unknown key 'foo'", keys},
    {"15m,UTIL=1", "unknown key 'UTIL'", keys},
    {"15m,util", "util has no value: write util=VALUE", ""},
    {"15m,util=", "util has no value: write util=VALUE", ""},
    {"15m,util=1,util=2", "util is given twice: once is allowed", ""},
    {"15m,util=101", "util '101'", percentages},
    {"15m,util=100.01", "util '100.01'", percentages},
    {"15m,util=-1", "util '-1'", percentages},
    {"15m,util=1.234", "util '1.234'", percentages},
    {"15m,util=5.", "util '5.'", percentages},
    {"15m,util=5%%", "util '5%%'", percentages},
    {"15m,mode=stop", "mode 'stop': allowed are requeue, inplace", ""},
    {"15m,io_uring=no", "io_uring 'no': allowed are deny, allow", ""},
    {"15m,when=never", "when 'never': allowed are pressure, always", ""},
    {"15m,steps=remote", "steps 'remote': allowed are slurm, local", ""},
    {"15m,after_loss=resume", "after_loss 'resume': allowed are image, start, hold, site", ""},
    {"15m,steps", "steps has no value: write steps=VALUE", ""},
    {"15m,wake=soon", "wake 'soon'", wakes},
    {"15m,wake=25:00", "wake '25:00'", wakes},
    {"15m,wake=2030-13-01", "wake '2030-13-01'", wakes},
    {"15m,wake=2030-02-29", "wake '2030-02-29'", wakes},
    {"15m,wake=2030-04-31T10:00", "wake '2030-04-31T10:00'", wakes},
    {"15m,wake=0000-01-01", "wake '0000-01-01'", wakes},
    {"15m,wake=0s", "wake '0s'", wakes},
    {"15m,wake=30", "wake '30'", wakes},
    {"15m,wake=9:60", "wake '9:60'", wakes},
    {"15m,wake=2030-12-31T", "wake '2030-12-31T'", wakes},
    {"15m,wake=now+2fortnights", "wake 'now+2fortnights'", wakes},
    {"15m,wake=now+9999999weeks", "wake 'now+9999999weeks'", wakes},
    {"15m,wake=now+367days", "wake 'now+367days'", wakes},
    {"15m,wake=400d", "wake '400d'", wakes},
    {"15m,wake=now+", "wake 'now+'", wakes},
    {"15m,signal=USR1", "signal 'USR1'", signals},
    {"15m,signal=USR1@", "signal 'USR1@'", signals},
    {"15m,signal=USR1@65536", "signal 'USR1@65536'", signals},
    {"15m,signal=KILL@5", "signal 'KILL@5'", signals},
    {"15m,signal=10@5", "signal '10@5'", signals},
    {"15m,signal=@5", "signal '@5'", signals},
};

static void valid_values_are_parsed(void)
{
    struct suspend_option option;
    char error[OPTION_ERROR_BYTES];
    char text[OPTION_TEXT_BYTES];

    for (size_t i = 0; i < sizeof(valid) / sizeof(*valid); i++) {
        if (!option_parse(valid[i].given, &option_builtin, &option, error, sizeof(error)))
            CHECK_TEXT(error, "");
        option_format(&option, text, sizeof(text));
        CHECK_TEXT(text, valid[i].found);
    }
}

static void invalid_values_are_reported(void)
{
    struct suspend_option option;
    char error[OPTION_ERROR_BYTES];
    char expected[OPTION_ERROR_BYTES];

    for (size_t i = 0; i < sizeof(refused) / sizeof(*refused); i++) {
        if (option_parse(refused[i].given, &option_builtin, &option, error, sizeof(error)))
            CHECK_TEXT(refused[i].given, "refused");
        snprintf(expected, sizeof(expected), "%s%s", refused[i].said, refused[i].allowed);
        CHECK_TEXT(error, expected);
        CHECK(strchr(error, '\n') == NULL);
    }
}

static void site_defaults_apply(void)
{
    struct suspend_option site;
    struct suspend_option option;
    char error[OPTION_ERROR_BYTES];
    char text[OPTION_TEXT_BYTES];

    CHECK(option_parse("30m,util=3,when=always", &option_builtin, &site, error, sizeof(error)));
    CHECK(option_parse("5m,util=1", &site, &option, error, sizeof(error)));
    option_format(&option, text, sizeof(text));
    CHECK_TEXT(text, "window=300,util=1,mode=requeue,wake=auto,when=always");
    CHECK(option_parse(NULL, &site, &option, error, sizeof(error)));
    CHECK(option.window_s == 1800);
    CHECK(option_parse("30m,steps=local", &option_builtin, &site, error, sizeof(error)));
    CHECK(option_parse("5m", &site, &option, error, sizeof(error)) && option.steps == STEPS_LOCAL);
    CHECK(option_parse("5m,steps=slurm", &site, &option, error, sizeof(error)) && option.steps == STEPS_SLURM);
}

static void site_limits_are_reported(void)
{
    struct option_limits limits = {.min_window_s = 300, .max_window_s = 7200, .modes = 1U << MODE_REQUEUE};
    struct suspend_option option = option_builtin;
    char error[OPTION_ERROR_BYTES];

    CHECK(option_check(&option, &limits, error, sizeof(error)));
    option.window_s = 299;
    CHECK(!option_check(&option, &limits, error, sizeof(error)));
    CHECK_TEXT(error, "window '299s': this site allows 5m to 2h");
    option.window_s = 7201;
    CHECK(!option_check(&option, &limits, error, sizeof(error)));
    option.window_s = 300;
    option.mode = MODE_INPLACE;
    CHECK(!option_check(&option, &limits, error, sizeof(error)));
    CHECK_TEXT(error, "mode 'inplace': this site allows requeue");
}

static void long_value_is_truncated_in_the_message(void)
{
    struct suspend_option option;
    char error[OPTION_ERROR_BYTES];
    char text[5000];

    memset(text, '7', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    CHECK(!option_parse(text, &option_builtin, &option, error, sizeof(error)));
    CHECK(strlen(error) < 200 && strstr(error, "...") != NULL);
}

/* Random values are rejected with a message of one line, or give an option within its bounds. */
static void random_values_are_safe(void)
{
    static const char *const pieces[] = {"15m",    ",",       "=",        "util",   "util=5", "mode=",  "requeue", "inplace", "wake=",
                                         "auto",   "hold",    "when=",    "always", "signal", "USR1@6", "-",       ":",       "0",
                                         "9",      "1",       "now+",     "T",      "%",      ".",      "\x01",    "\xff",    " ",
                                         "steps=local", "after_loss=start", "m",  "h",        "d",      "@",      "2030-1", "12:30",   "1-2:3",   "99999999999"};
    unsigned state = 1;
    unsigned accepted = 0;

    for (int round = 0; round < 400000; round++) {
        struct suspend_option option;
        char error[OPTION_ERROR_BYTES];
        char text[512] = "";
        char wire[OPTION_TEXT_BYTES];
        unsigned count = 1 + next_random(&state) % 7;

        if (next_random(&state) % 2)
            strcat(text, "15m,");
        while (count-- > 0)
            strcat(text, pieces[next_random(&state) % (sizeof(pieces) / sizeof(*pieces))]);
        if (next_random(&state) % 4 == 0)
            text[next_random(&state) % strlen(text)] = (char)(1 + next_random(&state) % 255);
        error[0] = '\0';
        if (!option_parse(text, &option_builtin, &option, error, sizeof(error))) {
            CHECK(error[0] != '\0' && strpbrk(error, "\n\r") == NULL);
            continue;
        }
        accepted++;
        CHECK(option.window_s > 0 && option.util_centi <= 10000 && option.before_s <= 65535);
        option_format(&option, wire, sizeof(wire));
        CHECK(strlen(wire) < sizeof(wire) - 1 && strpbrk(wire, "\n ") == NULL);
    }
    CHECK(accepted > 1000);
}

int main(void)
{
    valid_values_are_parsed();
    invalid_values_are_reported();
    site_defaults_apply();
    site_limits_are_reported();
    long_value_is_truncated_in_the_message();
    random_values_are_safe();
    return 0;
}
