/* Messages of the agent are parsed; all other packets are rejected. */
#include "check.h"
#include "message.h"

static bool parse(const char *packet, struct message *message)
{
    return message_parse(packet, strlen(packet), message);
}

static void messages_of_the_agent_are_parsed(void)
{
    struct message message;

    CHECK(parse("start", &message) && message.verb == VERB_START && !message.restore_failed);
    CHECK(parse("start\n", &message) && message.verb == VERB_START);
    CHECK(parse("start\nrestore_failed=1", &message) && message.restore_failed);
    CHECK(parse("restored\npid=2", &message) && message.verb == VERB_RESTORED && message.pid == 2);
    CHECK(parse("wait", &message) && message.verb == VERB_WAIT && !message.fresh);
    CHECK(!message.reports && parse("wait\nreports=1", &message) && message.verb == VERB_WAIT && message.reports);
    CHECK(parse("wait\nfresh=1", &message) && message.verb == VERB_WAIT && message.fresh);
    CHECK(parse("hold\nreason=image is damaged", &message) && message.verb == VERB_HOLD);
    CHECK_TEXT(message.text, "image is damaged");
    CHECK(parse("say\ntext=a=b \xc3\xa9\tc", &message) && message.verb == VERB_SAY);
    CHECK_TEXT(message.text, "a=b \xc3\xa9?c");
    CHECK(parse("signal\nnumber=10", &message) && message.verb == VERB_SIGNAL && message.number == 10);
    CHECK(parse("start\nlater=version", &message) && message.verb == VERB_START);
    CHECK(parse("dance\ntempo=fast", &message) && message.verb == VERB_UNKNOWN);
}

static void invalid_messages_are_rejected(void)
{
    static const char *const packets[] = {"",
                                          "\n",
                                          "\n\n",
                                          "START",
                                          "start now",
                                          "start\n\nrestore_failed=1",
                                          "start\nrestore_failed",
                                          "start\nrestore_failed=2",
                                          "start\nrestore_failed=",
                                          "wait\nreports=2",
                                          "wait\nfresh=2",
                                          "restored",
                                          "restored\npid=",
                                          "restored\npid=1",
                                          "restored\npid=-2",
                                          "restored\npid=2x",
                                          "restored\npid=99999999999",
                                          "restored\npid=4194305",
                                          "signal",
                                          "signal\nnumber=0",
                                          "signal\nnumber=65",
                                          "say",
                                          "say\ntext=",
                                          "{\"verb\": \"start\"}",
                                          "averyveryverylongverbthatnobodywouldsay"};
    struct message message;

    for (size_t i = 0; i < sizeof(packets) / sizeof(*packets); i++)
        if (parse(packets[i], &message))
            CHECK_TEXT(packets[i], "refused");
    CHECK(!message_parse("start\0\0", 7, &message));
}

static void long_text_is_truncated(void)
{
    struct message message;
    char packet[MESSAGE_BYTES];

    snprintf(packet, sizeof(packet), "say\ntext=");
    memset(packet + 9, 'x', sizeof(packet) - 9);
    CHECK(message_parse(packet, sizeof(packet), &message));
    CHECK(strlen(message.text) == MESSAGE_TEXT_BYTES - 1);
}

static void messages_of_the_shepherd_are_formatted(void)
{
    struct hello hello = {.job = 4000000000U, .restarts = 2, .image = true, .root = 0, .option = "window=900,util=0"};
    char text[MESSAGE_BYTES];

    CHECK(message_hello(&hello, text) == strlen(text));
    CHECK_TEXT(text, "hello\nversion=1\njob=4000000000\nrestarts=2\nimage=1\nroot=0\noption=window=900,util=0");
    message_started(2, text);
    CHECK_TEXT(text, "started\nroot=2");
    message_reaped(2, 0x300, text);
    CHECK_TEXT(text, "reaped\npid=2\nstatus=768");
    message_exit(0x8b, text);
    CHECK_TEXT(text, "exit\nstatus=139");
    message_signalled(15, text);
    CHECK_TEXT(text, "signalled\nnumber=15");
}

static void random_packets_are_safe(void)
{
    static const char *const pieces[] = {"start", "restored", "hold", "say", "signal", "\n", "=", "pid", "number", "text",
                                         "reason", "restore_failed", "1", "2", "99", "-", "x"};
    unsigned state = 7;
    unsigned accepted = 0;

    for (int round = 0; round < 300000; round++) {
        struct message message;
        char *packet;
        char text[256];
        size_t length = 0;
        unsigned count = next_random(&state) % 8;

        while (count-- > 0) {
            const char *piece = pieces[next_random(&state) % (sizeof(pieces) / sizeof(*pieces))];

            length += (size_t)snprintf(text + length, sizeof(text) - length, "%s", piece);
        }
        if (length > 0 && next_random(&state) % 3 == 0)
            text[next_random(&state) % length] = (char)next_random(&state);
        packet = malloc(length > 0 ? length : 1); /* of the exact size, so that the sanitizer detects an overread */
        CHECK(packet != NULL);
        memcpy(packet, text, length);
        accepted += message_parse(packet, length, &message);
        free(packet);
    }
    CHECK(accepted > 1000);
}

int main(void)
{
    messages_of_the_agent_are_parsed();
    invalid_messages_are_rejected();
    long_text_is_truncated();
    messages_of_the_shepherd_are_formatted();
    random_packets_are_safe();
    return 0;
}
