#pragma once

/*
 * Notices that files of the state directory were deleted or moved while the daemon uses them: the
 * kernel keeps such a file for as long as it is open, so nothing else fails before the restart that
 * no longer finds it.  A thread of its own (`kv-watch`), because looking at names may wait for a
 * disk.  Owned by: main.
 */

#include "kvstore/base/log.h"

struct state_watch;

struct state_watch_options {
    const char *dir; /* state.dir, open and locked. */
    struct kv_log *log;
    /* On the watch's thread, for each file that is gone.  `why` lives as long as the watch.
     * is_page_file: pages only; else records are lost with it, or the directory as a whole. */
    void (*gone)(void *context, bool is_page_file, const char *why);
    void *context;
};

/* After the store is open. */
kv_status state_watch_start(const struct state_watch_options *options,
                            struct state_watch **ret_watch, struct kv_error *err) KV_MUST_CHECK;

/* Ends the thread.  NULL is fine. */
void state_watch_destroy(struct state_watch *watch);
