/* Decimal numbers in the value of the option. */
#ifndef AFFINODE_NUMBER_H
#define AFFINODE_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

#define NUMBER_DIGITS 7 /* at most: enough for every value that is allowed, and a uint32_t cannot overflow */

static inline bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Reads the digits at *TEXT and moves *TEXT behind them. False: no digit, or more than NUMBER_DIGITS. */
static inline bool read_number(const char **text, uint32_t *number)
{
    uint32_t value = 0;
    int digits = 0;

    while (is_digit(**text)) {
        if (++digits > NUMBER_DIGITS)
            return false;
        value = value * 10 + (uint32_t)(**text - '0');
        (*text)++;
    }
    *number = value;
    return digits > 0;
}

#endif
