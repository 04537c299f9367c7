#include "wake_time.h"

#include "number.h"
#include "time_span.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static const char *const words[] = {"auto", "hold", "midnight", "noon", "fika", "teatime", "tomorrow"};
static const struct {
    const char *name;
    uint32_t seconds;
} units[] = {
    {"", 1},        {"second", 1},  {"seconds", 1}, {"minute", 60},   {"minutes", 60},   {"hour", 3600},
    {"hours", 3600}, {"day", 86400}, {"days", 86400}, {"week", 604800}, {"weeks", 604800},
};

static size_t count_digits(const char *text)
{
    size_t count = 0;

    while (is_digit(text[count]))
        count++;
    return count;
}

static bool is_word(const char *text)
{
    for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
        if (strcmp(text, words[i]) == 0)
            return true;
    return false;
}

/* Whether TEXT matches PATTERN, in which 0 stands for any digit. */
static bool has_form(const char *text, const char *pattern)
{
    for (; *pattern != '\0'; pattern++, text++)
        if (*pattern == '0' ? !is_digit(*text) : *text != *pattern)
            return false;
    return *text == '\0';
}

static unsigned two_digits(const char *text)
{
    return (unsigned)(text[0] - '0') * 10 + (unsigned)(text[1] - '0');
}

/* Hours with one digit or two. */
static bool is_clock(const char *text)
{
    unsigned hours;

    if (has_form(text, "0:00") || has_form(text, "0:00:00")) {
        hours = (unsigned)(text[0] - '0');
        text += 1;
    } else if (has_form(text, "00:00") || has_form(text, "00:00:00")) {
        hours = two_digits(text);
        text += 2;
    } else {
        return false;
    }
    return hours < 24 && two_digits(text + 1) < 60 && (text[3] == '\0' || two_digits(text + 4) < 60);
}

static unsigned month_days(unsigned year, unsigned month)
{
    static const unsigned char days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);

    return days[month - 1] + (month == 2 && leap);
}

static bool is_date(const char *text, size_t length)
{
    char date[11];
    unsigned year;
    unsigned month;
    unsigned day;

    if (length != 10)
        return false;
    memcpy(date, text, length);
    date[length] = '\0';
    if (!has_form(date, "0000-00-00"))
        return false;
    year = two_digits(date) * 100 + two_digits(date + 2);
    month = two_digits(date + 5);
    day = two_digits(date + 8);
    return year > 0 && month >= 1 && month <= 12 && day >= 1 && day <= month_days(year, month);
}

static bool is_span(const char *text)
{
    uint32_t seconds;
    size_t digits = count_digits(text);

    return text[digits] != '\0' && text[digits + 1] == '\0' && time_span_parse(text, &seconds);
}

/* The text behind "now+", as in sbatch --begin: a number and a unit, seconds without one. Longer waits are given as a date. */
static bool is_offset(const char *text)
{
    uint32_t count;

    if (!read_number(&text, &count))
        return false;
    for (size_t i = 0; i < sizeof(units) / sizeof(*units); i++)
        if (strcmp(text, units[i].name) == 0)
            return (uint64_t)count * units[i].seconds <= LONGEST_SPAN_S;
    return false;
}

bool wake_time_is_valid(const char *text)
{
    const char *time = strchr(text, 'T');

    if (is_word(text) || is_clock(text) || is_span(text))
        return true;
    if (strncmp(text, "now+", 4) == 0)
        return is_offset(text + 4);
    if (time != NULL)
        return is_date(text, (size_t)(time - text)) && is_clock(time + 1);
    return is_date(text, strlen(text));
}
