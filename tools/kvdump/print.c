/*
 * kvdump print: what a directory holds, from its records and headers; no page is read.
 *
 * Everything is put into one JSON document first, and the text for people is written from that, so
 * that the two cannot differ.  No token id and no row is in it.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const char *kind_name(uint8_t kind)
{
    static const char *const names[] = {"UNSPECIFIED", "PREFILL_END", "DECODE_END",
                                        "ANCHOR",      "MANUAL",      "BRANCH"};
    return kind < KV_ARRAY_COUNT(names) ? names[kind] : "?";
}

static const char *session_kind_name(uint8_t kind)
{
    static const char *const names[] = {"UNSPECIFIED", "MAIN", "SUB", "EPHEMERAL"};
    return kind < KV_ARRAY_COUNT(names) ? names[kind] : "?";
}

static json_t *json_hex(const uint8_t *bytes, uint32_t count)
{
    char text[65];
    dump_hex(bytes, KV_MIN(count, 32u), text);
    return json_string(text);
}

static json_t *json_u64(uint64_t value)
{
    return json_integer((json_int_t)value);
}

/* ---- the document ---- */

static json_t *page_json(struct dump *dump, const struct dump_page *page)
{
    const struct kv_record_page *record = &page->record;
    char file[32];
    (void)snprintf(file, sizeof(file), "segment-%06" PRIu32 ".kv",
                   record->ssd_page / dump->pages_per_segment);
    struct kv_page_cipher cipher = {0};
    const bool is_known =
        page->cause == NULL && dump_page_cipher(dump, record->ssd_page, &cipher) == KV_OK;
    return json_pack("{s:I, s:I, s:I, s:s, s:I, s:I, s:I, s:s, s:I, s:s*}", "uid",
                     (json_int_t)record->uid, "position", (json_int_t)record->position, "count",
                     (json_int_t)record->count, "file", file, "page",
                     (json_int_t)(record->ssd_page % dump->pages_per_segment), "offset",
                     (json_int_t)dump_offset(dump, record->ssd_page), "generation",
                     (json_int_t)record->generation, "cipher",
                     !is_known            ? "?"
                     : cipher.key_id == 0 ? "none"
                                          : "AES-256-GCM",
                     "key", (json_int_t)cipher.key_id, "damage", page->cause);
}

static json_t *node_json(const struct dump_node *node)
{
    const struct kv_record_node *record = &node->record;
    char kernels[KV_KERNELS_NAME_BYTES];
    json_t *replays = json_array(), *pages = json_array();
    for (uint32_t i = 0; i < record->replay_count; i++)
        (void)json_array_append_new(replays, json_u64(record->replays[i]));
    for (uint32_t i = 0; i < record->page_count; i++)
        (void)json_array_append_new(pages, json_u64(kv_load64(node->uids + (size_t)8 * i)));
    return json_pack("{s:I, s:s, s:o, s:o, s:o, s:s, s:I, s:I, s:o, s:o}", "position",
                     (json_int_t)record->tokens, "kind", kind_name(record->kind), "id",
                     json_hex(record->id.bytes, 16), "parent",
                     record->has_parent ? json_hex(record->parent.bytes, 16) : json_null(),
                     "digest", json_hex(record->digest.bytes, 32), "kernels",
                     kv_kernels_name(record->kernels, kernels), "created_ms",
                     (json_int_t)record->created_ms, "used_ms", (json_int_t)record->used_ms,
                     "replays", replays, "pages", pages);
}

static json_t *session_json(const struct dump_session *session)
{
    char label[DUMP_LABEL_BYTES];
    dump_label(session, label);
    json_t *json = json_pack(
        "{s:s, s:o, s:s, s:s, s:I, s:I, s:I, s:I, s:o, s:I, s:o, s:o, s:I}", "session", label, "id",
        json_hex(session->id.bytes, 16), "kind", session_kind_name(session->kind), "parent",
        session->parent_name, "created_ms", (json_int_t)session->created_ms, "used_ms",
        (json_int_t)session->used_ms, "ttl_ms", (json_int_t)session->ttl_ms, "head_position",
        (json_int_t)session->head_tokens, "head",
        session->has_head ? json_hex(session->head.bytes, 16) : json_null(), "checkpoints_recorded",
        (json_int_t)session->checkpoints, "tree",
        session->has_tree ? json_hex(session->tree.bytes, 16) : json_null(), "forked_from",
        session->has_origin ? json_hex(session->origin.bytes, 16) : json_null(), "forked_at",
        (json_int_t)session->origin_tokens);
    return json;
}

static kv_status count_tree(struct dump *dump, struct dump_tree *tree, void *context)
{
    (void)context;
    dump->counts.checkpoints += tree->node_count;
    dump->counts.pages += tree->page_count;
    for (uint32_t i = 0; i < tree->page_count; i++)
        (void)dump_claim(dump, tree, &tree->pages[i]);
    dump_tell(dump);
    return KV_OK;
}

static json_t *removals_json(const struct dump_tree *tree)
{
    json_t *all = json_array();
    for (uint32_t i = 0; tree->has_history && i < tree->history.removal_count; i++) {
        const struct kv_removal *r = &tree->history.removals[i];
        (void)json_array_append_new(
            all,
            json_pack("{s:s, s:b, s:I, s:I, s:I, s:I, s:s, s:I, s:I}", "cause",
                      kv_reason_info(r->cause)->name, "rows_kept", r->part == KV_REMOVED_CHECKPOINT,
                      "from", (json_int_t)r->from, "to", (json_int_t)r->to, "checkpoints",
                      (json_int_t)r->checkpoints, "removed_ms", (json_int_t)r->removed_ms,
                      "limit_name", kv_limit_name(r->limit_of), "limit", (json_int_t)r->limit,
                      "value", (json_int_t)r->value));
    }
    return all;
}

static kv_status list_tree(struct dump *dump, struct dump_tree *tree, void *context)
{
    json_t *json = context, *nodes = json_array(), *pages = json_array();
    for (uint32_t i = 0; i < tree->node_count; i++)
        (void)json_array_append_new(nodes, node_json(&tree->nodes[i]));
    for (uint32_t i = 0; i < tree->page_count; i++) {
        if (tree->pages[i].record.ssd_page / dump->pages_per_segment >= dump->segment_count)
            tree->pages[i].cause = strdup("its segment file is missing");
        (void)json_array_append_new(pages, page_json(dump, &tree->pages[i]));
    }
    const bool ok = json_object_set_new(json, "checkpoints", nodes) == 0 &&
                    json_object_set_new(json, "removals", removals_json(tree)) == 0 &&
                    json_object_set_new(json, "pages", pages) == 0;
    return ok ? KV_OK : KV_NOMEM;
}

static json_t *segments_json(const struct dump *dump)
{
    json_t *all = json_array();
    for (uint32_t i = 0; i < dump->segment_count; i++) {
        const struct dump_segment *segment = &dump->segments[i];
        char file[32];
        if (!segment->is_there) continue;
        const uint32_t bad = dump_quarantine_count(dump, i);
        (void)snprintf(file, sizeof(file), "segment-%06" PRIu32 ".kv", i);
        (void)json_array_append_new(
            all,
            json_pack("{s:I, s:s, s:I, s:I, s:I, s:I, s:s*, s:I, s:s*}", "number", (json_int_t)i,
                      "file", file, "bytes", (json_int_t)segment->file_bytes, "pages_used",
                      (json_int_t)segment->used, "pages_quarantined", (json_int_t)bad, "pages_free",
                      (json_int_t)(dump->pages_per_segment - segment->used - bad), "state",
                      dump_segment_state(segment), "used_ms", (json_int_t)segment->used_ms,
                      "damage", segment->cause[0] == '\0' ? NULL : segment->cause));
    }
    return all;
}

static json_t *quarantined_json(const struct dump *dump)
{
    json_t *all = json_array();
    for (uint32_t i = 0; i < dump->quarantined_count; i++) {
        const struct kv_record_quarantine *record = &dump->quarantined[i];
        char file[32];
        (void)snprintf(file, sizeof(file), "segment-%06" PRIu32 ".kv",
                       record->ssd_page / dump->pages_per_segment);
        (void)json_array_append_new(
            all, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:s}", "file", file, "page",
                           (json_int_t)(record->ssd_page % dump->pages_per_segment), "offset",
                           (json_int_t)dump_offset(dump, record->ssd_page), "generation",
                           (json_int_t)record->generation, "found_ms", (json_int_t)record->found_ms,
                           "owners", (json_int_t)record->owners, "found_by",
                           kv_found_by_name(record->found_by), "cause", record->cause));
    }
    return all;
}

static json_t *old_branches_json(const struct dump *dump)
{
    json_t *all = json_array();
    for (uint32_t i = 0; i < dump->old_branch_count; i++) {
        const struct kv_record_old_branch *record = &dump->old_branches[i];
        (void)json_array_append_new(all, json_pack("{s:o, s:o, s:I, s:I}", "session",
                                                   json_hex(record->session.bytes, 16), "end",
                                                   json_hex(record->end.bytes, 16), "until_ms",
                                                   (json_int_t)record->until_ms, "stop_tokens",
                                                   (json_int_t)record->stop_tokens));
    }
    return all;
}

static json_t *encryption_json(const struct dump *dump)
{
    const struct kv_superblock *superblock = &dump->superblock;
    if (dump->keys == NULL) return json_null();
    return json_pack("{s:o, s:o, s:I}", "master_key",
                     json_hex(superblock->master.master.bytes, KV_MASTER_ID_BYTES),
                     "next_master_key",
                     superblock->has_next_master
                         ? json_hex(superblock->next_master.master.bytes, KV_MASTER_ID_BYTES)
                         : json_null(),
                     "keys", (json_int_t)dump_keys_count(dump));
}

static json_t *directory_json(const struct dump *dump)
{
    const struct kv_superblock *superblock = &dump->superblock;
    return json_pack(
        "{s:o, s:i, s:s, s:I, s:I, s:b, s:o, s:I, s:I, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, "
        "s:I, "
        "s:I, s:I, s:I, s:o, s:o, s:o, s:I, s:I, s:I}",
        "encryption", encryption_json(dump), "schema", 1, "directory", dump->dir, "layout_version",
        (json_int_t)KV_LAYOUT_VERSION, "features", (json_int_t)superblock->features, "doubt",
        (int)dump->is_doubted, "id", json_hex(superblock->id.bytes, 16), "created_ms",
        (json_int_t)superblock->created_ms, "page_bytes", (json_int_t)superblock->page_bytes,
        "window_tokens", (json_int_t)superblock->window_tokens, "segment_bytes",
        (json_int_t)superblock->segment_bytes, "model",
        dump->has_store ? json_hex(dump->store.model.bytes, 32) : json_null(), "starts",
        (json_int_t)(dump->has_store ? dump->store.boots : 0), "users",
        (json_int_t)dump->user_count, "sessions", (json_int_t)dump->session_count, "checkpoints",
        (json_int_t)dump->counts.checkpoints, "pages", (json_int_t)dump->counts.pages,
        "page_bytes_used", (json_int_t)(dump->counts.pages * superblock->page_bytes), "batches",
        (json_int_t)dump->commit, "batches_acknowledged",
        (json_int_t)(dump->noted_status == KV_OK ? dump->noted.number : 0), "clock_believed_ms",
        (json_int_t)dump->clock_floor_ms, "segments", segments_json(dump), "quarantined",
        quarantined_json(dump), "old_branches", old_branches_json(dump),
        "deleted", (json_int_t)dump->deleted_count, "plans", (json_int_t)dump->plan_count,
        "quotas", (json_int_t)dump->quota_count);
}

/* ---- text ---- */

static long long number(const json_t *json, const char *name)
{
    return (long long)json_integer_value(json_object_get(json, name));
}

static const char *text(const json_t *json, const char *name)
{
    const json_t *value = json_object_get(json, name);
    return json_is_string(value) ? json_string_value(value) : "-";
}

static void print_time(const char *name, long long ms)
{
    char line[32] = "?";
    const time_t seconds = (time_t)(ms / 1000);
    struct tm parts;
    if (gmtime_r(&seconds, &parts) != NULL)
        (void)strftime(line, sizeof(line), "%Y-%m-%d %H:%M:%S UTC", &parts);
    (void)printf("%-14s %s\n", name, line);
}

static void print_directory(const json_t *json)
{
    size_t i;
    json_t *segment;
    (void)printf("%-14s %s\n%-14s %lld, features 0x%llx\n%-14s %s\n", "directory",
                 text(json, "directory"), "layout version", number(json, "layout_version"),
                 number(json, "features"), "id", text(json, "id"));
    print_time("made", number(json, "created_ms"));
    (void)printf("%-14s %s\n%-14s %lld\n", "model", text(json, "model"), "starts",
                 number(json, "starts"));
    (void)printf("%-14s %lld, acknowledged %lld\n", "batches", number(json, "batches"),
                 number(json, "batches_acknowledged"));
    (void)printf("%-14s %lld B, window of %lld tokens\n", "page", number(json, "page_bytes"),
                 number(json, "window_tokens"));
    (void)printf("%-14s %lld users, %lld sessions, %lld checkpoints\n", "holds",
                 number(json, "users"), number(json, "sessions"), number(json, "checkpoints"));
    (void)printf("%-14s %lld pages, %lld B\n%-14s %zu of %lld B\n", "", number(json, "pages"),
                 number(json, "page_bytes_used"), "segments",
                 json_array_size(json_object_get(json, "segments")), number(json, "segment_bytes"));
    const json_t *encryption = json_object_get(json, "encryption");
    if (json_is_object(encryption))
        (void)printf("%-14s AES-256-GCM, master key %s, %lld keys of users\n", "encryption",
                     text(encryption, "master_key"), number(encryption, "keys"));
    (void)printf("%-14s %zu places\n", "quarantined",
                 json_array_size(json_object_get(json, "quarantined")));
    (void)printf("%-14s %zu, left by compactions\n", "old branches",
                 json_array_size(json_object_get(json, "old_branches")));
    (void)printf("\n%-18s %14s %8s %8s %-7s\n", "SEGMENT", "BYTES", "USED", "FREE", "STATE");
    json_array_foreach(json_object_get(json, "segments"), i, segment)
    {
        const char *damage = json_string_value(json_object_get(segment, "damage"));
        (void)printf("%-18s %14lld %8lld %8lld %-7s%s%s\n", text(segment, "file"),
                     number(segment, "bytes"), number(segment, "pages_used"),
                     number(segment, "pages_free"), text(segment, "state"),
                     damage == NULL ? "" : "  ", damage == NULL ? "" : damage);
    }
}

static void print_session(const json_t *json)
{
    size_t i;
    json_t *item;
    (void)printf("\n%-14s %s\n%-14s %s\n%-14s %s\n", "session", text(json, "session"), "id",
                 text(json, "id"), "kind", text(json, "kind"));
    print_time("made", number(json, "created_ms"));
    print_time("used", number(json, "used_ms"));
    (void)printf("%-14s %lld, %s\n\n%9s %-11s %-32s %-32s %5s\n", "head",
                 number(json, "head_position"), text(json, "head"), "POSITION", "KIND",
                 "CHECKPOINT", "PARENT", "PAGES");
    json_array_foreach(json_object_get(json, "checkpoints"), i, item)
    {
        (void)printf("%9lld %-11s %-32s %-32s %5zu\n", number(item, "position"), text(item, "kind"),
                     text(item, "id"), text(item, "parent"),
                     json_array_size(json_object_get(item, "pages")));
    }
    (void)printf("\n%18s %9s %5s %-18s %8s %12s %18s %11s %3s\n", "PAGE", "POSITION", "COUNT",
                 "SEGMENT", "PLACE", "OFFSET", "GENERATION", "CIPHER", "KEY");
    json_array_foreach(json_object_get(json, "pages"), i, item)
    {
        (void)printf("%18lld %9lld %5lld %-18s %8lld %12lld %18lld %11s %3lld\n",
                     number(item, "uid"), number(item, "position"), number(item, "count"),
                     text(item, "file"), number(item, "page"), number(item, "offset"),
                     number(item, "generation"), text(item, "cipher"), number(item, "key"));
    }
    if (json_array_size(json_object_get(json, "removals")) == 0) return;
    (void)printf("\n%-13s %9s %9s %11s %-12s %14s\n", "REMOVED", "FROM", "TO", "CHECKPOINTS",
                 "LIMIT", "OF");
    json_array_foreach(json_object_get(json, "removals"), i, item)
    {
        (void)printf("%-13s %9lld %9lld %11lld %-12s %14lld\n", text(item, "cause"),
                     number(item, "from"), number(item, "to"), number(item, "checkpoints"),
                     text(item, "limit_name"), number(item, "limit"));
    }
}

/* ---- the command ---- */

static bool is_asked(const struct dump_session *session, const char *name)
{
    char label[DUMP_LABEL_BYTES];
    dump_label(session, label);
    return strcmp(session->name, name) == 0 || strcmp(label, name) == 0;
}

static kv_status list_sessions(struct dump *dump, const char *name, json_t *list,
                               struct kv_error *err)
{
    for (uint32_t i = 0; i < dump->session_count; i++) {
        if (!is_asked(&dump->sessions[i], name)) continue;
        json_t *json = session_json(&dump->sessions[i]);
        if (json == NULL || json_array_append_new(list, json) != 0)
            return KV_FAIL(err, KV_NOMEM, "list session %s: no memory", name);
        const kv_status status = dump_trees(dump, &dump->sessions[i].tree, list_tree, json, err);
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

static int write_out(const json_t *document, bool json)
{
    size_t i;
    json_t *session;
    if (json) {
        if (json_dumpf(document, stdout, JSON_INDENT(2)) != 0) return DUMP_FAILED;
        return putchar('\n') == '\n' ? DUMP_OK : DUMP_FAILED;
    }
    print_directory(document);
    json_array_foreach(json_object_get(document, "session_trees"), i, session)
        print_session(session);
    return DUMP_OK;
}

int dump_print(struct dump *dump, const char *session, bool json)
{
    struct kv_error err = {0};
    json_t *list = json_array();
    json_t *document = NULL;
    kv_status status = dump_trees(dump, NULL, count_tree, NULL, &err);
    if (status == KV_OK && session != NULL) status = list_sessions(dump, session, list, &err);
    int code = status == KV_CORRUPT ? DUMP_DAMAGED : DUMP_FAILED;
    if (status == KV_OK) document = directory_json(dump);
    if (status != KV_OK) {
        dump_error("%s", err.text);
    } else if (session != NULL && json_array_size(list) == 0) {
        dump_error("no session %s", session);
        code = DUMP_NOT_FOUND;
    } else if (document == NULL || json_object_set(document, "session_trees", list) != 0) {
        dump_error("no memory");
    } else {
        code = write_out(document, json);
    }
    json_decref(document);
    json_decref(list);
    return code == DUMP_OK && dump->counts.damages > 0 ? DUMP_DAMAGED : code;
}
