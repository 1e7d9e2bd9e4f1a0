/*
 * RotateKey: the master key is read anew, and the keys of all users are put under it.
 *
 * The call names no key: it is read from where the configuration says, so that no key travels and
 * the next start finds the right one.  What a caller does when its answer was lost is to call
 * again: a key that is in use already is no error.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/arena.h"
#include "kvstore/base/secret.h"

#include <errno.h>
#include <string.h>

static void rotated(void *context, kv_status status)
{
    struct flow *flow = context;
    struct kv_store *store = flow->shard->store;
    struct request_rotation *out = &flow->req->out.rotation;
    const struct kv_encryption_facts facts = kv_store_encryption(store);
    if (status == KV_BUSY)
        flow_fail(flow, KV_REASON_SSD_FULL, "manifest", NULL, NULL);
    else if (status != KV_OK)
        flow_fail(flow, KV_REASON_SSD_READ_ONLY, "manifest", NULL, NULL);
    out->rotated = status == KV_OK;
    out->keys = facts.keys;
    memcpy(out->master, facts.master, sizeof(out->master));
    flow_finish(flow);
}

static void not_started(struct flow *flow, kv_status status, const struct kv_error *err)
{
    struct request_rotation *out = &flow->req->out.rotation;
    switch (status) {
    case KV_MISS:
        out->before[0] = '\0';
        flow_finish(flow);
        return;
    case KV_BUSY:
        flow->failed = true;
        request_fail(flow->req, KV_REASON_SESSION_BUSY, "key", NULL, NULL,
                     "Another rotation of the master key is under way.");
        flow->req->out.failure.retry_ms = 50;
        break;
    case KV_IO:
        flow_fail(flow, shard_unwritten(err), "superblock", NULL,
                  kv_arena_strdup(flow->req->arena, err->text, strlen(err->text)));
        break;
    default:
        flow_fail_status(flow, status);
        break;
    }
    flow_finish(flow);
}

static void rotate(struct flow *flow, uint8_t *key)
{
    const struct shard_options *options = &flow->shard->options;
    struct kv_error err = {0};
    if (options->read_master_key(options->key_context, key, &err) != KV_OK) {
        if (flow->failed) return;
        flow->failed = true;
        request_fail(flow->req, KV_REASON_MASTER_KEY_INVALID, options->key_setting,
                     "32 bytes or 64 hex digits, mode 600", NULL,
                     "The new master key cannot be read: %s.", err.text);
        flow_finish(flow);
        return;
    }
    const kv_status status = kv_store_rotate_start(flow->shard->store, key, rotated, flow, &err);
    if (status != KV_OK) not_started(flow, status, &err);
}

void flow_rotate_key(struct flow *flow)
{
    const struct shard *shard = flow->shard;
    const struct kv_encryption_facts facts = kv_store_encryption(shard->store);
    struct request_rotation *out = &flow->req->out.rotation;
    struct kv_secrets *secrets = NULL;
    if (!facts.is_encrypted || shard->options.read_master_key == NULL) {
        flow_fail(flow, KV_REASON_ENCRYPTION_OFF, "ssd.encryption", "on", "off");
        flow_finish(flow);
        return;
    }
    memcpy(out->master, facts.master, sizeof(out->master));
    memcpy(out->before, facts.master, sizeof(out->before));
    out->keys = facts.keys;
    uint8_t *key =
        kv_secrets_create(32, &secrets, NULL) == KV_OK ? kv_secrets_alloc(secrets) : NULL;
    if (key == NULL) {
        kv_secrets_destroy(secrets);
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    rotate(flow, key);
    kv_secrets_destroy(secrets);
}
