#include "message.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#define LARGEST_PID (1 << 22)
#define LARGEST_SIGNAL 64

static bool is_word(const char *word, size_t length)
{
    if (length == 0 || length > 32)
        return false;
    for (size_t i = 0; i < length; i++)
        if ((word[i] < 'a' || word[i] > 'z') && word[i] != '_')
            return false;
    return true;
}

static enum verb verb_of(const char *word, size_t length)
{
    static const struct {
        const char *word;
        enum verb verb;
    } verbs[] = {{"start", VERB_START}, {"restored", VERB_RESTORED}, {"wait", VERB_WAIT},
                 {"hold", VERB_HOLD},   {"say", VERB_SAY},           {"signal", VERB_SIGNAL}};

    for (size_t i = 0; i < sizeof(verbs) / sizeof(*verbs); i++)
        if (strlen(verbs[i].word) == length && memcmp(verbs[i].word, word, length) == 0)
            return verbs[i].verb;
    return VERB_UNKNOWN;
}

static bool read_number(const char *value, size_t length, int least, int most, int *number)
{
    int64_t found = 0;

    if (length == 0 || length > 10)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (value[i] < '0' || value[i] > '9')
            return false;
        found = found * 10 + (value[i] - '0');
    }
    if (found < least || found > most)
        return false;
    *number = (int)found;
    return true;
}

static void read_text(const char *value, size_t length, char *text)
{
    size_t used = 0;

    for (; used < length && used < MESSAGE_TEXT_BYTES - 1; used++) {
        unsigned char byte = (unsigned char)value[used];

        text[used] = (char)(byte < 0x20 || byte == 0x7f ? '?' : byte);
    }
    text[used] = '\0';
}

static bool is_key(const char *line, size_t length, const char *key)
{
    return length == strlen(key) && memcmp(line, key, length) == 0;
}

static bool read_field(const char *line, size_t key_length, const char *value, size_t length, struct message *message)
{
    int number;

    if (message->verb == VERB_START && is_key(line, key_length, "restore_failed")) {
        if (!read_number(value, length, 0, 1, &number))
            return false;
        message->restore_failed = number == 1;
    } else if (message->verb == VERB_WAIT && is_key(line, key_length, "fresh")) {
        if (!read_number(value, length, 0, 1, &number))
            return false;
        message->fresh = number == 1;
    } else if (message->verb == VERB_WAIT && is_key(line, key_length, "reports")) {
        if (!read_number(value, length, 0, 1, &number))
            return false;
        message->reports = number == 1;
    } else if (message->verb == VERB_RESTORED && is_key(line, key_length, "pid")) {
        return read_number(value, length, 2, LARGEST_PID, &message->pid);
    } else if (message->verb == VERB_SIGNAL && is_key(line, key_length, "number")) {
        return read_number(value, length, 1, LARGEST_SIGNAL, &message->number);
    } else if ((message->verb == VERB_HOLD && is_key(line, key_length, "reason")) ||
               (message->verb == VERB_SAY && is_key(line, key_length, "text"))) {
        read_text(value, length, message->text);
    }
    return true;
}

static bool is_complete(const struct message *message)
{
    switch (message->verb) {
    case VERB_RESTORED:
        return message->pid != 0;
    case VERB_SIGNAL:
        return message->number != 0;
    case VERB_SAY:
        return message->text[0] != '\0';
    case VERB_UNKNOWN:
    case VERB_START:
    case VERB_WAIT:
    case VERB_HOLD:
        return true;
    }
    return false;
}

bool message_parse(const char *packet, size_t length, struct message *message)
{
    const char *end = packet + length;
    const char *line = packet;
    bool first = true;

    memset(message, 0, sizeof(*message));
    if (length > 0 && end[-1] == '\n')
        end--;
    if (end == packet || memchr(packet, '\0', length) != NULL)
        return false;
    while (line <= end) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        const char *equals;

        if (stop == NULL)
            stop = end;
        if (first) {
            if (!is_word(line, (size_t)(stop - line)))
                return false;
            message->verb = verb_of(line, (size_t)(stop - line));
        } else {
            equals = memchr(line, '=', (size_t)(stop - line));
            if (equals == NULL || !is_word(line, (size_t)(equals - line)) ||
                !read_field(line, (size_t)(equals - line), equals + 1, (size_t)(stop - equals - 1), message))
                return false;
        }
        first = false;
        line = stop + 1;
    }
    return is_complete(message);
}

static size_t length_of(int printed)
{
    return printed < 0 ? 0 : printed >= MESSAGE_BYTES ? MESSAGE_BYTES - 1 : (size_t)printed;
}

size_t message_hello(const struct hello *hello, char *text)
{
    return length_of(snprintf(text, MESSAGE_BYTES,
                              "hello\nversion=%d\njob=%" PRIu32 "\nrestarts=%" PRIu32 "\nimage=%d\nroot=%d\noption=%s",
                              PROTOCOL_VERSION, hello->job, hello->restarts, hello->image ? 1 : 0, (int)hello->root,
                              hello->option));
}

size_t message_started(pid_t root, char *text)
{
    return length_of(snprintf(text, MESSAGE_BYTES, "started\nroot=%d", (int)root));
}

size_t message_reaped(pid_t pid, int wait_status, char *text)
{
    return length_of(snprintf(text, MESSAGE_BYTES, "reaped\npid=%d\nstatus=%d", (int)pid, wait_status & 0xffff));
}

size_t message_exit(int wait_status, char *text)
{
    return length_of(snprintf(text, MESSAGE_BYTES, "exit\nstatus=%d", wait_status & 0xffff));
}

size_t message_signalled(int number, char *text)
{
    return length_of(snprintf(text, MESSAGE_BYTES, "signalled\nnumber=%d", number));
}
