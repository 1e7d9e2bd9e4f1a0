#pragma once

/* One store on some disk and some manifest, and the loop that a shard runs for it.  Owned by: the
 * thread that calls it. */

#include "kvstore/store/store.h"

#define WORLD_SEGMENT_PAGES 8u
#define WORLD_PAGES_MAX 160u /* Of the SSD tier. */
#define WORLD_HBM_PAGES 40u

struct world {
    struct kv_layout layout;
    struct kv_disk *disk; /* Borrowed, like the next. */
    struct kv_manifest *manifest;
    struct kv_mailbox *mailbox;
    struct kv_clock *clock;
    struct kv_store *store; /* NULL: not open. */
    uint32_t master;        /* Encrypted: which of the two master keys opened it. */
};

/* Stores that are opened from here on are encrypted, or not. */
void world_encrypt(bool on);
bool world_encrypts(void);
/* Starts to put the store under the other master key, if nothing is under way of that. */
void world_rotate(struct world *world);

/* As a daemon does before it opens a manifest: the superblock, made or compared. */
kv_status world_directory(struct kv_disk *disk, const char *dir,
                          struct kv_error *err) KV_MUST_CHECK;
/* The same, and the store; under whichever of the two master keys opens it.  `dir` exists on the
 * disk.  What fails leaves the world as after world_close(). */
kv_status world_open(struct world *world, struct kv_disk *disk, struct kv_manifest *manifest,
                     const char *dir, struct kv_error *err) KV_MUST_CHECK;
/* Nothing may be in flight. */
void world_close(struct world *world);

void world_turn(struct world *world);
/* Turns until nothing is in flight; false: that does not end. */
bool world_settle(struct world *world) KV_MUST_CHECK;

/* The session, created in memory if nothing is known of it. */
struct kv_session *world_session(struct world *world, uint32_t session);
/* Its tree in memory; false: it could not be had. */
bool world_load(struct world *world, struct kv_session *session);

/* Records of pages in the manifest; *ret_astray: those whose place the segments' table does not
 * have in use. */
uint32_t world_page_records(struct world *world, uint32_t *ret_astray);
