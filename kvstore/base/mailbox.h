#pragma once

/* Many-to-one queue of messages with a wake-up descriptor: the only way across threads.
 *
 * A message is embedded in its owner (a request, a job, a batch), so posting never allocates and
 * never fails, and the queue is bounded by the number of owners.  The receiver runs each message's
 * function on its own thread, in the order posted.  A message may be posted again from inside its
 * own run function, or after it has run. */

#include "kvstore/base/status.h"

#include <stdint.h>

struct kv_msg;
typedef void kv_msg_fn(struct kv_msg *msg);

struct kv_msg {
    kv_msg_fn *run; /* Set by the sender before posting. */
    struct kv_msg *next; /* Owned by the mailbox while queued. */
};

struct kv_mailbox;

kv_status kv_mailbox_create(struct kv_mailbox **ret_mailbox, struct kv_error *err) KV_MUST_CHECK;
void kv_mailbox_destroy(struct kv_mailbox *mailbox);

/* Any thread.  The sender must not touch the message, nor its owner, after this line. */
void kv_mailbox_post(struct kv_mailbox *mailbox, struct kv_msg *msg);

/* Receiver only.  Runs up to `max` queued messages; returns how many ran. */
uint32_t kv_mailbox_run(struct kv_mailbox *mailbox, uint32_t max);

/* Readable (eventfd, non-blocking) while messages wait. */
int kv_mailbox_fd(const struct kv_mailbox *mailbox);

/* Receiver only: blocks until a message waits or timeout_ms passed (-1: no limit). */
void kv_mailbox_wait(struct kv_mailbox *mailbox, int timeout_ms);
