#include "time_span.h"

#include "number.h"

#include <inttypes.h>
#include <stdio.h>

static bool fits(uint64_t seconds, uint32_t *out)
{
    if (seconds == 0 || seconds > LONGEST_SPAN_S)
        return false;
    *out = (uint32_t)seconds;
    return true;
}

static bool read_unit(char unit, uint32_t number, uint32_t *seconds)
{
    switch (unit) {
    case 's':
        return fits(number, seconds);
    case 'm':
        return fits((uint64_t)number * 60, seconds);
    case 'h':
        return fits((uint64_t)number * 3600, seconds);
    case 'd':
        return fits((uint64_t)number * 86400, seconds);
    default:
        return false;
    }
}

bool time_span_parse(const char *text, uint32_t *seconds)
{
    uint32_t part[3] = {0};
    uint32_t days = 0;
    int parts = 0;
    bool has_days = false;

    if (!read_number(&text, &part[parts++]))
        return false;
    if (*text != '\0' && text[1] == '\0' && !is_digit(*text))
        return read_unit(*text, part[0], seconds);
    if (*text == '-') {
        has_days = true;
        days = part[0];
        text++;
        if (!read_number(&text, &part[0]))
            return false;
    }
    while (*text == ':' && parts < 3) {
        text++;
        if (!read_number(&text, &part[parts++]))
            return false;
    }
    if (*text != '\0')
        return false;
    if (has_days) /* after the days the first number is always hours */
        return fits((uint64_t)days * 86400 + (uint64_t)part[0] * 3600 + (uint64_t)part[1] * 60 + part[2], seconds);
    if (parts == 3)
        return fits((uint64_t)part[0] * 3600 + (uint64_t)part[1] * 60 + part[2], seconds);
    return fits((uint64_t)part[0] * 60 + part[1], seconds); /* minutes, or minutes and seconds */
}

void time_span_format(uint32_t seconds, char *text, size_t size)
{
    if (seconds % 86400 == 0)
        snprintf(text, size, "%" PRIu32 "d", seconds / 86400);
    else if (seconds % 3600 == 0)
        snprintf(text, size, "%" PRIu32 "h", seconds / 3600);
    else if (seconds % 60 == 0)
        snprintf(text, size, "%" PRIu32 "m", seconds / 60);
    else
        snprintf(text, size, "%" PRIu32 "s", seconds);
}
