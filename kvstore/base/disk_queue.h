#pragma once

/* Ops in a row, linked through themselves.  For implementations of disk.h; whose thread, they say.
 */

#include "kvstore/base/disk.h"

#include <stddef.h>

struct kv_disk_queue {
    struct kv_disk_op *head;
    struct kv_disk_op *tail;
};

static inline void kv_disk_queue_push(struct kv_disk_queue *queue, struct kv_disk_op *op)
{
    op->next = NULL;
    if (queue->tail == NULL) {
        queue->head = op;
    } else {
        queue->tail->next = op;
    }
    queue->tail = op;
}

static inline struct kv_disk_op *kv_disk_queue_pop(struct kv_disk_queue *queue)
{
    struct kv_disk_op *op = queue->head;
    if (op == NULL) return NULL;
    queue->head = op->next;
    if (queue->head == NULL) queue->tail = NULL;
    op->next = NULL;
    return op;
}

/* All of `more`, which is empty then. */
static inline void kv_disk_queue_append(struct kv_disk_queue *queue, struct kv_disk_queue *more)
{
    if (more->head == NULL) return;
    if (queue->tail == NULL) {
        queue->head = more->head;
    } else {
        queue->tail->next = more->head;
    }
    queue->tail = more->tail;
    *more = (struct kv_disk_queue){0};
}
