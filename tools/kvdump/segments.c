/*
 * What is counted in records, against what is there: places in use by segment, checkpoints by
 * session.  A start relies on both without reading a tree.
 *
 * Where another record is damaged and could not be read, nothing can be counted, and its own line
 * says enough.  A doubt means that a daemon has found such damage and will count again.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Without the bit nobody reads them. */
static bool has_counts(const struct dump *dump)
{
    return (dump->superblock.features & KV_FEATURE_SEGMENTS) != 0;
}

kv_status dump_visit_segment(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_segment record;
    uint32_t number;
    if (!has_counts(dump)) return KV_OK;
    if (put->key_bytes == 1) {
        dump->is_doubted = true;
        return KV_OK;
    }
    if (!kv_key_segment_parse(put->key, put->key_bytes, &number) ||
        kv_record_segment_decode(put->value, put->value_bytes, &record) != KV_OK ||
        record.pages != dump->pages_per_segment) {
        dump_damage(dump, "manifest: a segment's record is damaged; the next start of a daemon "
                          "counts again");
        dump->counts.unread++;
        return KV_OK;
    }
    /* Pages of a file that is not there have a line each already. */
    if (number >= dump->segment_count) return KV_OK;
    struct dump_segment *segment = &dump->segments[number];
    const uint32_t bytes = kv_record_segment_bits(record.pages);
    segment->bits = malloc(bytes);
    if (segment->bits == NULL) return KV_NOMEM;
    memcpy(segment->bits, record.bits, bytes);
    segment->has_record = true;
    segment->state = record.state;
    segment->used_ms = record.used_ms;
    return KV_OK;
}

const char *dump_segment_state(const struct dump_segment *segment)
{
    if (!segment->has_record) return NULL;
    return segment->state == KV_SEGMENT_SEALED ? "sealed" : "open";
}

/* Its maker left the tree, and should have left it to another session. */
static void dump_orphan(struct dump *dump, const struct dump_tree *tree,
                        const struct kv_record_node *node)
{
    char label[DUMP_LABEL_BYTES], id[33];
    dump_label(tree->session, label);
    dump_hex(node->id.bytes, 16, id);
    dump_damage(dump,
                "checkpoint %s at position %" PRIu32
                " of the tree of session %s: made by a session that has no head there",
                id, node->tokens, label);
}

void dump_count_tree(struct dump *dump, const struct dump_tree *tree)
{
    if (tree->session == NULL) return;
    for (uint32_t i = 0; i < tree->node_count; i++) {
        const struct kv_record_node *node = &tree->nodes[i].record;
        struct dump_session *maker =
            dump_session_find(dump, node->has_maker ? &node->maker : &tree->id);
        if (maker != NULL && kv_id_equal(maker->tree.bytes, tree->id.bytes))
            maker->found++;
        else
            dump_orphan(dump, tree, node);
    }
}

static bool is_recorded(const struct dump_segment *segment, uint32_t page)
{
    return segment->has_record && (segment->bits[page / 8] >> (page % 8) & 1) != 0;
}

/* One line, for the first page that differs. */
static void check_segment(struct dump *dump, uint32_t number)
{
    const struct dump_segment *segment = &dump->segments[number];
    const uint32_t *claims = dump->claims + (size_t)number * dump->pages_per_segment;
    uint32_t first = UINT32_MAX, differing = 0;
    if (!segment->is_there) return;
    for (uint32_t page = 0; page < dump->pages_per_segment; page++) {
        if ((claims[page] != 0) == is_recorded(segment, page)) continue;
        first = KV_MIN(first, page);
        differing++;
    }
    if (differing == 0) return;
    char label[DUMP_LABEL_BYTES] = "without a record", more[40] = "";
    if (claims[first] != 0 && claims[first] != UINT32_MAX)
        dump_label(&dump->sessions[claims[first] - 1], label);
    if (differing > 1)
        (void)snprintf(more, sizeof(more), "; %" PRIu32 " more differ", differing - 1);
    if (claims[first] == 0)
        dump_damage(dump,
                    "segment-%06" PRIu32 ".kv: its record has page %" PRIu32 " in use, and no page "
                    "record names it%s",
                    number, first, more);
    else
        dump_damage(dump,
                    "segment-%06" PRIu32 ".kv: its record has page %" PRIu32 " free, and a page of "
                    "session %s is there%s",
                    number, first, label, more);
}

void dump_check_counted(struct dump *dump)
{
    if (!has_counts(dump) || dump->is_doubted || dump->counts.unread > 0) return;
    for (uint32_t i = 0; i < dump->segment_count; i++)
        check_segment(dump, i);
    for (uint32_t i = 0; i < dump->session_count; i++) {
        const struct dump_session *session = &dump->sessions[i];
        char label[DUMP_LABEL_BYTES];
        if (session->found == session->checkpoints) continue;
        dump_label(session, label);
        dump_damage(dump,
                    "session %s: its record counts %" PRIu32 " checkpoints, %" PRIu32 " are there",
                    label, session->checkpoints, session->found);
    }
}
