/*
 * How a failed call is told to programs and to people.
 *
 * The daemon sends google.rpc.Status in the trailing metadata: ErrorInfo with the stable reason and
 * the field, limit and value concerned, RetryInfo when trying again helps.  All of it is input from
 * a peer: texts are cut to fit, anything that does not parse is left out, and bytes that a terminal
 * could take for commands are replaced.
 */

#include "tools/client/client_failure.h"

#include "proto/status.pb-c.h"

#include <assert.h>
#include <fcntl.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void text_copy(char *to, size_t to_bytes, const char *from)
{
    size_t count = 0;

    assert(to_bytes > 0);
    for (; from && from[count] != '\0' && count + 1 < to_bytes; count++) {
        const unsigned char c = (unsigned char)from[count];
        to[count] = (char)(c < 0x20 || c == 0x7f ? ' ' : c);
    }
    to[count] = '\0';
}

static bool type_is(const char *type_url, const char *name)
{
    const char *slash = type_url ? strrchr(type_url, '/') : NULL;
    return slash && strcmp(slash + 1, name) == 0;
}

static void take_error_info(struct client_failure *failure, const ProtobufCBinaryData *value)
{
    Google__Rpc__ErrorInfo *info = google__rpc__error_info__unpack(NULL, value->len, value->data);
    if (!info) return;

    text_copy(failure->reason, sizeof(failure->reason), info->reason);
    for (size_t i = 0; i < info->n_metadata; i++) {
        const char *key = info->metadata[i]->key;
        const char *text = info->metadata[i]->value;
        if (strcmp(key, "field") == 0) text_copy(failure->field, sizeof(failure->field), text);
        if (strcmp(key, "limit") == 0) text_copy(failure->limit, sizeof(failure->limit), text);
        if (strcmp(key, "value") == 0) text_copy(failure->value, sizeof(failure->value), text);
    }
    google__rpc__error_info__free_unpacked(info, NULL);
}

static void take_retry_info(struct client_failure *failure, const ProtobufCBinaryData *value)
{
    Google__Rpc__RetryInfo *info = google__rpc__retry_info__unpack(NULL, value->len, value->data);
    if (!info) return;

    const Google__Rpc__RetryInfo__Duration *delay = info->retry_delay;
    if (delay && delay->seconds >= 0 && delay->seconds < 86400 && delay->nanos >= 0) {
        failure->retry_ms = (uint64_t)delay->seconds * 1000 + (uint64_t)delay->nanos / 1000000;
    }
    google__rpc__retry_info__free_unpacked(info, NULL);
}

void client_failure_fill(struct client_failure *failure, int code, const char *text,
                         const uint8_t *details, size_t details_bytes)
{
    memset(failure, 0, sizeof(*failure));
    failure->code = (enum client_code)code;
    text_copy(failure->text, sizeof(failure->text), text);
    if (details_bytes == 0) return;

    Google__Rpc__Status *status = google__rpc__status__unpack(NULL, details_bytes, details);
    if (!status) return;
    for (size_t i = 0; i < status->n_details; i++) {
        const Google__Rpc__Any *any = status->details[i];
        if (type_is(any->type_url, "google.rpc.ErrorInfo")) take_error_info(failure, &any->value);
        if (type_is(any->type_url, "google.rpc.RetryInfo")) take_retry_info(failure, &any->value);
    }
    google__rpc__status__free_unpacked(status, NULL);
}

enum client_exit client_exit_code(enum client_code code)
{
    switch (code) {
    case CLIENT_OK:
        return CLIENT_EXIT_OK;
    case CLIENT_NOT_FOUND:
        return CLIENT_EXIT_NOT_FOUND;
    case CLIENT_UNAUTHENTICATED:
    case CLIENT_PERMISSION_DENIED:
        return CLIENT_EXIT_DENIED;
    /* All four mean: nothing is wrong with the request, try again. */
    case CLIENT_CANCELLED:
    case CLIENT_ABORTED:
    case CLIENT_DEADLINE_EXCEEDED:
    case CLIENT_UNAVAILABLE:
        return CLIENT_EXIT_UNAVAILABLE;
    case CLIENT_RESOURCE_EXHAUSTED:
        return CLIENT_EXIT_QUOTA;
    case CLIENT_DATA_LOSS:
        return CLIENT_EXIT_CORRUPT;
    case CLIENT_UNKNOWN:
    case CLIENT_INVALID_ARGUMENT:
    case CLIENT_ALREADY_EXISTS:
    case CLIENT_FAILED_PRECONDITION:
    case CLIENT_OUT_OF_RANGE:
    case CLIENT_UNIMPLEMENTED:
    case CLIENT_INTERNAL:
        return CLIENT_EXIT_FAILED;
    }
    return CLIENT_EXIT_FAILED;
}

static size_t append(char *text, size_t text_bytes, size_t used, const char *before,
                     const char *part)
{
    if (part[0] == '\0' || used + 1 >= text_bytes) return used;
    const int added = snprintf(text + used, text_bytes - used, "%s%s", before, part);
    assert(added >= 0);
    return used + (size_t)added < text_bytes ? used + (size_t)added : text_bytes - 1;
}

void client_failure_print(const struct client_failure *failure, char *text, size_t text_bytes)
{
    char retry[32] = "";
    size_t used = 0;

    assert(text_bytes > 0);
    text[0] = '\0';
    used = append(text, text_bytes, used, "", failure->text[0] ? failure->text : "the call failed");
    if (failure->reason[0] == '\0') return;
    if (failure->retry_ms > 0) {
        (void)snprintf(retry, sizeof(retry), "%llums", (unsigned long long)failure->retry_ms);
    }
    used = append(text, text_bytes, used, " (", failure->reason);
    const size_t after_reason = used;
    used = append(text, text_bytes, used, ", field=", failure->field);
    used = append(text, text_bytes, used,
                  used == after_reason ? ", limit=" : " limit=", failure->limit);
    used = append(text, text_bytes, used,
                  used == after_reason ? ", value=" : " value=", failure->value);
    used = append(text, text_bytes, used, used == after_reason ? ", retry=" : " retry=", retry);
    (void)append(text, text_bytes, used, "", ")");
}

bool client_read_token(const char *path, char *token, size_t token_bytes, char *why,
                       size_t why_bytes)
{
    enum { TOKEN_BYTES_MAX = 256 };

    assert(token_bytes > TOKEN_BYTES_MAX);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, token, TOKEN_BYTES_MAX);
    if (got < 0) (void)snprintf(why, why_bytes, "token file %s: %s", path, strerror(errno));
    if (fd >= 0) (void)close(fd);
    if (got < 0) return false;

    token[got] = '\0';
    token[strcspn(token, " \t\r\n")] = '\0';
    for (const char *p = token; *p != '\0'; p++) {
        if (*p <= ' ' || *p > '~') token[0] = '\0'; /* Not a header value: refuse it here. */
    }
    if (token[0] != '\0') return true;
    (void)snprintf(why, why_bytes, "token file %s holds no token in its first line", path);
    return false;
}
