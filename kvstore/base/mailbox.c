/*
 * The only way across threads: an intrusive many-to-one queue with an eventfd.
 *
 * The sender writes the eventfd after it has left the lock: the receiver wakes at once and would
 * else sleep again on the lock its sender still holds, which costs a hop more than the hop itself.
 * So a message can be received, and its owner be gone, while its sender still is about to write;
 * `senders` counts those, and destroying waits for them.
 *
 * The eventfd is written on the step from empty to non-empty and drained only when a run finds
 * nothing left, so a burst costs one write and one read, and "readable while messages wait" holds
 * for the messages already taken off the shared list too.
 */

#include "kvstore/base/mailbox.h"

#include "kvstore/base/clock.h"

#include <assert.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct kv_mailbox {
    int fd;
    struct kv_msg *ready; /* Owned by the receiver: taken, not yet run. */

    pthread_mutex_t lock; /* Guards what follows. */
    struct kv_msg *head;
    struct kv_msg *tail;
    bool signalled; /* The eventfd is readable, or its writer is on the way. */

    atomic_uint senders; /* Inside kv_mailbox_post(). */
};

kv_status kv_mailbox_create(struct kv_mailbox **ret_mailbox, struct kv_error *err)
{
    struct kv_mailbox *mailbox = calloc(1, sizeof(*mailbox));
    if (mailbox == NULL) return KV_FAIL(err, KV_NOMEM, "create a mailbox");
    mailbox->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (mailbox->fd < 0) {
        const kv_status status = KV_FAIL_ERRNO(err, KV_IO, "create the eventfd of a mailbox");
        free(mailbox);
        return status;
    }
    (void)pthread_mutex_init(&mailbox->lock, NULL); /* Cannot fail with default attributes. */
    *ret_mailbox = mailbox;
    return KV_OK;
}

void kv_mailbox_destroy(struct kv_mailbox *mailbox)
{
    if (mailbox == NULL) return;
    /* The last sender may still be before its eventfd write. */
    while (atomic_load_explicit(&mailbox->senders, memory_order_acquire) > 0)
        (void)sched_yield();
    (void)pthread_mutex_destroy(&mailbox->lock);
    (void)close(mailbox->fd);
    free(mailbox);
}

void kv_mailbox_post(struct kv_mailbox *mailbox, struct kv_msg *msg)
{
    assert(msg->run != NULL);
    msg->next = NULL;

    (void)atomic_fetch_add_explicit(&mailbox->senders, 1, memory_order_relaxed);
    (void)pthread_mutex_lock(&mailbox->lock);
    if (mailbox->tail == NULL) {
        mailbox->head = msg;
    } else {
        mailbox->tail->next = msg;
    }
    mailbox->tail = msg;
    const bool wake = !mailbox->signalled;
    mailbox->signalled = true;
    (void)pthread_mutex_unlock(&mailbox->lock);
    if (wake) {
        /* The counter goes from 0 to 1: a non-blocking write cannot fail. */
        const int rc = eventfd_write(mailbox->fd, 1);
        assert(rc == 0);
    }
    (void)atomic_fetch_sub_explicit(&mailbox->senders, 1, memory_order_release);
}

/* Moves all posted messages to the receiver; when there are none, makes the eventfd unreadable. */
static void take(struct kv_mailbox *mailbox)
{
    (void)pthread_mutex_lock(&mailbox->lock);
    mailbox->ready = mailbox->head;
    mailbox->head = NULL;
    mailbox->tail = NULL;
    if (mailbox->ready == NULL && mailbox->signalled) {
        /* Nothing to read: its writer is on the way, and the next run drains it. */
        eventfd_t drained;
        if (eventfd_read(mailbox->fd, &drained) == 0) mailbox->signalled = false;
    }
    (void)pthread_mutex_unlock(&mailbox->lock);
}

uint32_t kv_mailbox_run(struct kv_mailbox *mailbox, uint32_t max)
{
    uint32_t count = 0;
    while (count < max) {
        if (mailbox->ready == NULL) take(mailbox);
        struct kv_msg *msg = mailbox->ready;
        if (msg == NULL) break;
        mailbox->ready = msg->next;
        msg->next = NULL;
        msg->run(msg); /* May post the message again, or free its owner. */
        count++;
    }
    return count;
}

int kv_mailbox_fd(const struct kv_mailbox *mailbox)
{
    return mailbox->fd;
}

void kv_mailbox_wait(struct kv_mailbox *mailbox, int timeout_ms)
{
    struct pollfd poll_fd = {.fd = mailbox->fd, .events = POLLIN};
    const uint64_t start_ns = kv_clock_stopwatch_ns();
    int left_ms = timeout_ms;
    while (poll(&poll_fd, 1, left_ms) < 0 && errno == EINTR) {
        if (timeout_ms < 0) continue;
        const uint64_t passed_ms = (kv_clock_stopwatch_ns() - start_ns) / 1000000u;
        if (passed_ms >= (uint64_t)timeout_ms) return;
        left_ms = timeout_ms - (int)passed_ms;
    }
}
