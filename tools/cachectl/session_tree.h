#pragma once

/* The checkpoints of a session, drawn. */

#include "tools/client/client.h"

/* details: what each checkpoint holds, as well. */
void session_tree_print(const Cached__Session__V1__GetSessionResponse *answer, bool details);

/* Words for them, in session.c. */
const char *checkpoint_kind_name(Cached__Session__V1__CheckpointKind kind);
const char *level_name(Cached__Session__V1__Level level);
