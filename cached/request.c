/*
 * Texts of a failed request.
 *
 * They live in the request's arena, so nobody frees them.  When the arena is exhausted the failure
 * still happens: a text is then the reason's own, which is a literal.
 */

#include "cached/request.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define TEXT_MAX 512u

const char *request_u64(struct request *req, uint64_t value)
{
    char text[24];
    const int count = snprintf(text, sizeof(text), "%" PRIu64, value);
    return kv_arena_strdup(req->arena, text, (size_t)count);
}

void request_fail(struct request *req, enum kv_reason reason, const char *field, const char *limit,
                  const char *value, const char *fmt, ...)
{
    struct request_failure *failure = &req->out.failure;
    char text[TEXT_MAX];

    *failure = (struct request_failure){
        .failed = true,
        .reason = reason,
        .field = field,
        .limit = limit,
        .value = value,
        .text = kv_reason_info(reason)->cause,
    };
    if (fmt == NULL) return;

    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    const char *copy = kv_arena_strdup(req->arena, text, strlen(text));
    if (copy != NULL) failure->text = copy;
}
