/*
 * The only way across threads: an intrusive many-to-one queue with an eventfd.
 *
 * A mutex and not a lock-free list, for lifetime: the sender writes the eventfd while it holds the
 * lock, and the receiver takes messages only under the lock, so once a message has been received
 * its sender has left the mailbox and the receiver may destroy it.  (A lock-free push would write
 * to the eventfd after the message is visible, when mailbox and descriptor may be gone.)
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
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct kv_mailbox {
    int fd;
    struct kv_msg *ready; /* Owned by the receiver: taken, not yet run. */

    pthread_mutex_t lock; /* Guards what follows. */
    struct kv_msg *head;
    struct kv_msg *tail;
    bool signalled; /* The eventfd is readable. */
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
    /* The last sender may still be between its eventfd write and its unlock. */
    (void)pthread_mutex_lock(&mailbox->lock);
    (void)pthread_mutex_unlock(&mailbox->lock);
    (void)pthread_mutex_destroy(&mailbox->lock);
    (void)close(mailbox->fd);
    free(mailbox);
}

void kv_mailbox_post(struct kv_mailbox *mailbox, struct kv_msg *msg)
{
    assert(msg->run != NULL);
    msg->next = NULL;

    (void)pthread_mutex_lock(&mailbox->lock);
    if (mailbox->tail == NULL) {
        mailbox->head = msg;
    } else {
        mailbox->tail->next = msg;
    }
    mailbox->tail = msg;
    if (!mailbox->signalled) {
        mailbox->signalled = true;
        /* The counter goes from 0 to 1: a non-blocking write cannot fail. */
        const int rc = eventfd_write(mailbox->fd, 1);
        assert(rc == 0);
    }
    (void)pthread_mutex_unlock(&mailbox->lock);
}

/* Moves all posted messages to the receiver; when there are none, makes the eventfd unreadable. */
static void take(struct kv_mailbox *mailbox)
{
    (void)pthread_mutex_lock(&mailbox->lock);
    mailbox->ready = mailbox->head;
    mailbox->head = NULL;
    mailbox->tail = NULL;
    if (mailbox->ready == NULL && mailbox->signalled) {
        eventfd_t drained;
        const int rc = eventfd_read(mailbox->fd, &drained);
        assert(rc == 0);
        mailbox->signalled = false;
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
