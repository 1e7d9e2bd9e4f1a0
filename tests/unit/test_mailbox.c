/*
 * The mailbox.
 *
 * Goal: order is the order of posting, nothing is lost or run twice, the descriptor is readable
 * exactly while messages wait, and a receiver may destroy the mailbox with the last message.
 * Method: one thread for order and descriptor; several senders against one receiver for counts (run
 * under TSan too), with messages that are posted again and again.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/mailbox.h"
#include "kvstore/base/thread.h"
#include "tests/harness.h"

#include <poll.h>
#include <unistd.h>

#define MESSAGES 100u
#define SENDERS 4u

static bool readable(struct kv_mailbox *mailbox)
{
    struct pollfd fd = {.fd = kv_mailbox_fd(mailbox), .events = POLLIN};
    return poll(&fd, 1, 0) == 1;
}

struct item {
    struct kv_msg msg;
    struct kv_mailbox *mailbox;
    uint32_t number;
    uint32_t again;
    uint32_t *expected;
};

static void item_run(struct kv_msg *msg)
{
    struct item *item = KV_CONTAINER_OF(msg, struct item, msg);
    if (item->expected != NULL) EXPECT_EQ_U32(item->number, (*item->expected)++);
    if (item->again == 0) return;
    item->again--;
    kv_mailbox_post(item->mailbox, msg);
}

static void test_order_and_descriptor(void)
{
    static struct item items[MESSAGES];
    struct kv_mailbox *mailbox = NULL;
    uint32_t expected = 0;
    EXPECT(kv_mailbox_create(&mailbox, NULL) == KV_OK);
    EXPECT(!readable(mailbox));
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 10), 0);
    for (uint32_t i = 0; i < MESSAGES; i++) {
        items[i] = (struct item){.msg = {.run = item_run}, .number = i, .expected = &expected};
        kv_mailbox_post(mailbox, &items[i].msg);
        EXPECT(readable(mailbox));
    }
    kv_mailbox_wait(mailbox, -1);
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 30), 30);
    EXPECT(readable(mailbox)); /* 70 are left. */
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, MESSAGES), 70);
    EXPECT_EQ_U32(expected, MESSAGES);
    EXPECT(!readable(mailbox));

    /* Left over from one take, and posted since: the old ones first. */
    expected = 0;
    for (uint32_t i = 0; i < 4; i++)
        kv_mailbox_post(mailbox, &items[i].msg);
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 2), 2);
    for (uint32_t i = 4; i < 6; i++)
        kv_mailbox_post(mailbox, &items[i].msg);
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 4), 4);
    EXPECT_EQ_U32(expected, 6);
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 1), 0);
    EXPECT(!readable(mailbox));
    kv_mailbox_destroy(mailbox);
    kv_mailbox_destroy(NULL);
}

static void test_post_from_run(void)
{
    struct kv_mailbox *mailbox = NULL;
    EXPECT(kv_mailbox_create(&mailbox, NULL) == KV_OK);
    struct item item = {.msg = {.run = item_run}, .mailbox = mailbox, .again = 10};
    kv_mailbox_post(mailbox, &item.msg);
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 4), 4); /* Bounded, though it always has one more. */
    EXPECT(readable(mailbox));
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 100), 7);
    EXPECT(!readable(mailbox));
    kv_mailbox_destroy(mailbox);
}

static void test_wait_times_out(void)
{
    struct kv_mailbox *mailbox = NULL;
    EXPECT(kv_mailbox_create(&mailbox, NULL) == KV_OK);
    const uint64_t start_ns = kv_clock_stopwatch_ns();
    kv_mailbox_wait(mailbox, 20);
    EXPECT(kv_clock_stopwatch_ns() - start_ns >= 19000000);
    kv_mailbox_wait(mailbox, 0);
    kv_mailbox_destroy(mailbox);
}

struct sender {
    struct kv_thread thread;
    struct kv_mailbox *to;   /* The receiver. */
    struct kv_mailbox *back; /* Ours: the message comes home. */
    struct kv_msg msg;
    uint64_t rounds;
    uint64_t sent;
    uint64_t received; /* Receiver's. */
    bool home;
};

static void sender_home(struct kv_msg *msg)
{
    KV_CONTAINER_OF(msg, struct sender, msg)->home = true;
}

static void sender_received(struct kv_msg *msg)
{
    struct sender *sender = KV_CONTAINER_OF(msg, struct sender, msg);
    sender->received++;
    msg->run = sender_home;
    kv_mailbox_post(sender->back, msg);
}

static void sender_main(void *arg)
{
    struct sender *sender = arg;
    while (sender->sent < sender->rounds) {
        sender->home = false;
        sender->msg.run = sender_received;
        sender->sent++;
        kv_mailbox_post(sender->to, &sender->msg);
        while (!sender->home) {
            kv_mailbox_wait(sender->back, -1);
            (void)kv_mailbox_run(sender->back, 1);
        }
    }
}

static void test_many_senders(void)
{
    static struct sender senders[SENDERS];
    struct kv_mailbox *mailbox = NULL;
    const uint64_t rounds = harness_count(5000);
    EXPECT(kv_mailbox_create(&mailbox, NULL) == KV_OK);
    for (uint32_t i = 0; i < SENDERS; i++) {
        senders[i] = (struct sender){.to = mailbox, .rounds = rounds};
        EXPECT(kv_mailbox_create(&senders[i].back, NULL) == KV_OK);
        EXPECT(kv_thread_start(&senders[i].thread, KV_THREAD_ANY, "sender", sender_main,
                               &senders[i], NULL) == KV_OK);
    }
    for (uint64_t count = 0; count < SENDERS * rounds;) {
        kv_mailbox_wait(mailbox, -1);
        count += kv_mailbox_run(mailbox, 3);
    }
    for (uint32_t i = 0; i < SENDERS; i++) {
        kv_thread_join(&senders[i].thread);
        EXPECT_EQ_U64(senders[i].received, rounds);
        kv_mailbox_destroy(senders[i].back);
    }
    EXPECT_EQ_U32(kv_mailbox_run(mailbox, 10), 0);
    kv_mailbox_destroy(mailbox);
}

static void answer_main(void *arg)
{
    struct item *item = arg;
    kv_mailbox_post(item->mailbox, &item->msg);
}

/* The receiver destroys the mailbox as soon as the answer is in, while its sender may still be
 * inside post: ASan and TSan would see a sender that touches it afterwards. */
static void test_destroy_after_last_message(void)
{
    for (uint64_t i = harness_count(300); i > 0; i--) {
        struct item item = {.msg = {.run = item_run}};
        struct kv_thread thread = {0};
        EXPECT(kv_mailbox_create(&item.mailbox, NULL) == KV_OK);
        EXPECT(kv_thread_start(&thread, KV_THREAD_ANY, "answer", answer_main, &item, NULL) ==
               KV_OK);
        while (kv_mailbox_run(item.mailbox, 1) == 0)
            kv_mailbox_wait(item.mailbox, -1);
        kv_mailbox_destroy(item.mailbox);
        kv_thread_join(&thread);
    }
}

int main(void)
{
    test_order_and_descriptor();
    test_post_from_run();
    test_wait_times_out();
    test_many_senders();
    test_destroy_after_last_message();
    HARNESS_END();
}
