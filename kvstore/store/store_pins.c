/*
 * Pins: checkpoints that stay, whatever else would go first.
 *
 * A pin is a use that lasts: the rows on the way to its checkpoint count as used when it ends, so
 * no age can pass meanwhile, and its window is held in the pool.  What makes room looks at it: a
 * checkpoint with a pin is no victim, those above it have a child.  There are few, so they are a
 * list.  Deleting a session, or finding its bytes damaged, does not ask them.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>

static bool is_of(const struct kv_pin *pin, const struct kv_tree *tree)
{
    return kv_id_equal(pin->tree.bytes, tree->id.bytes);
}

struct kv_pin *kv_store_pin_find(struct kv_store *store, const struct kv_node *node)
{
    const uint64_t now_ms = store->pin_count == 0 ? 0 : kv_store_now_ms(store);
    for (uint32_t i = 0; i < store->pin_count; i++) {
        struct kv_pin *pin = &store->pins[i];
        if (kv_id_equal(pin->node.bytes, node->id.bytes) && is_of(pin, node->session->tree) &&
            pin->until_ms > now_ms)
            return pin;
    }
    return NULL;
}

bool kv_store_pin_holds(const struct kv_store *store, const struct kv_tree *tree)
{
    for (uint32_t i = 0; i < store->pin_count; i++)
        if (is_of(&store->pins[i], tree)) return true;
    return false;
}

kv_status kv_store_pin(struct kv_store *store, struct kv_node *node, uint64_t until_ms)
{
    struct kv_pin *pin = kv_store_pin_find(store, node);
    const uint64_t now_ms = kv_store_now_ms(store), now_ns = kv_store_now_ns(store);
    if (until_ms <= now_ms) {
        if (pin != NULL) *pin = store->pins[--store->pin_count];
        kv_pool_hold(store->pool, &node->image, 0);
        return KV_OK;
    }
    if (pin == NULL) {
        kv_store_pins_tick(store);
        if (store->pin_count == KV_PINS_MAX) return KV_BUSY;
        pin = &store->pins[store->pin_count++];
        *pin = (struct kv_pin){
            .user = node->session->user->id, .tree = node->session->tree->id, .node = node->id};
    }
    pin->until_ms = until_ms;
    kv_store_renew(store, node);
    kv_index_renew(node, until_ms);
    if (kv_pool_has(store->pool, &node->image, now_ns))
        kv_pool_hold(store->pool, &node->image, now_ns + (until_ms - now_ms) * 1000000u);
    return KV_OK;
}

/* Pages of the path that no pin before this one has counted. */
static uint64_t path_pages(const struct kv_node *node, struct kv_node *const *counted,
                           uint32_t count)
{
    uint64_t pages = 0;
    for (; node != NULL; node = node->parent) {
        for (uint32_t i = 0; i < count; i++)
            if (kv_index_is_ancestor(node, counted[i])) return pages;
        pages += node->page_count;
        /* Where the one above ends in the middle of a page, both list it. */
        if (node->parent != NULL && node->page_count > 0 && node->parent->page_count > 0 &&
            node->parent->pages[node->parent->page_count - 1] == node->pages[0])
            pages--;
    }
    return pages;
}

struct kv_pin_use kv_store_pin_use(struct kv_store *store, const struct kv_user_id *user,
                                   const struct kv_node *more)
{
    struct kv_node *counted[KV_PINS_PER_USER_MAX + 1];
    struct kv_pin_use use = {0};
    const uint64_t now_ms = kv_store_now_ms(store), now_ns = kv_store_now_ns(store);
    bool is_there = more == NULL;
    for (uint32_t i = 0; i <= store->pin_count && use.pins < KV_ARRAY_COUNT(counted); i++) {
        const struct kv_pin *pin = i < store->pin_count ? &store->pins[i] : NULL;
        struct kv_node *node = (struct kv_node *)(uintptr_t)more;
        if (pin == NULL && is_there) break;
        if (pin != NULL) {
            if (pin->until_ms <= now_ms || !kv_id_equal(pin->user.bytes, user->bytes)) continue;
            struct kv_session *session = kv_index_tree_session(store->index, &pin->tree);
            node = session == NULL || session->tree->load != KV_LOAD_DONE
                       ? NULL
                       : kv_index_node_find(session, &pin->node);
            if (node == NULL) continue;
            is_there |= node == more;
        }
        use.pages += path_pages(node, counted, use.pins);
        use.windows += kv_pool_has(store->pool, &node->image, now_ns) ? 1 : 0;
        counted[use.pins++] = node;
    }
    return use;
}

void kv_store_pins_tick(struct kv_store *store)
{
    const uint64_t now_ms = store->pin_count == 0 ? 0 : kv_store_now_ms(store);
    for (uint32_t i = store->pin_count; i-- > 0;)
        if (store->pins[i].until_ms <= now_ms) store->pins[i] = store->pins[--store->pin_count];
}
