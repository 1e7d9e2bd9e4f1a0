#pragma once

/*
 * The C client of the daemon: small and synchronous.  One struct client is one channel and one
 * bearer token, used by one thread.  Requests and answers are the generated messages of proto/, so
 * the comments of the .proto files are the reference of every field.
 *
 * A call returns true and an answer, or false and a struct client_failure that says in words, and
 * in the API's stable reasons, what was wrong.
 */

#include "proto/admin.pb-c.h"
#include "proto/session.pb-c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The gRPC status codes by the numbers they have on the wire, so that callers need no gRPC header.
 */
enum client_code {
    CLIENT_OK = 0,
    CLIENT_CANCELLED = 1,
    CLIENT_UNKNOWN = 2,
    CLIENT_INVALID_ARGUMENT = 3,
    CLIENT_DEADLINE_EXCEEDED = 4,
    CLIENT_NOT_FOUND = 5,
    CLIENT_ALREADY_EXISTS = 6,
    CLIENT_PERMISSION_DENIED = 7,
    CLIENT_RESOURCE_EXHAUSTED = 8,
    CLIENT_FAILED_PRECONDITION = 9,
    CLIENT_ABORTED = 10,
    CLIENT_OUT_OF_RANGE = 11,
    CLIENT_UNIMPLEMENTED = 12,
    CLIENT_INTERNAL = 13,
    CLIENT_UNAVAILABLE = 14,
    CLIENT_DATA_LOSS = 15,
    CLIENT_UNAUTHENTICATED = 16,
};

/* What a program exits with; documented in docs/cachectl.md. */
enum client_exit {
    CLIENT_EXIT_OK = 0,
    CLIENT_EXIT_FAILED = 1,
    CLIENT_EXIT_USAGE = 2,
    CLIENT_EXIT_NOT_FOUND = 3,
    CLIENT_EXIT_DENIED = 4,
    CLIENT_EXIT_UNAVAILABLE = 5,
    CLIENT_EXIT_QUOTA = 6,
    CLIENT_EXIT_CORRUPT = 7,
};

/* Why a call failed.  Texts are cut to fit and empty when the daemon sent none. */
struct client_failure {
    enum client_code code;
    char text[320]; /* One sentence. */
    char reason[48];
    char field[48];
    char limit[48];
    char value[96];
    uint64_t retry_ms; /* 0: the daemon did not say that trying again helps. */
};

struct client_options {
    const char *endpoint; /* "unix:/path" or "host:port". */
    const char *token;    /* NULL: no authorization is sent. */
    uint32_t timeout_ms;  /* Of each call; > 0. */
};

enum client_method {
    CLIENT_OPEN_SESSION,
    CLIENT_LOOKUP,
    CLIENT_PREFILL,
    CLIENT_DECODE, /* client_stream() only. */
    CLIENT_CHECKPOINT,
    CLIENT_WAIT_DURABLE,
    CLIENT_ROLLBACK,
    CLIENT_FORK,
    CLIENT_COMPACT,
    CLIENT_PIN,
    CLIENT_TOUCH,
    CLIENT_GET_USAGE,
    CLIENT_CLOSE_SESSION,
    CLIENT_LIST_SESSIONS,
    CLIENT_GET_SESSION,
    CLIENT_GET_STATS,
    CLIENT_GET_CONFIG,
    CLIENT_ADVANCE_CLOCK,
    CLIENT_SCRUB,
    CLIENT_DISK_USAGE,
    CLIENT_DELETE_SESSION,
    CLIENT_ERASE_USER,
    CLIENT_ROTATE_KEY,
    CLIENT_WHY,
    CLIENT_PURGE_MODEL,
    CLIENT_SET_QUOTA,
    CLIENT_GET_QUOTA,
    CLIENT_DELETE_QUOTA,
    CLIENT_SET_PLAN,
    CLIENT_LIST_PLANS,
    CLIENT_LIST_USERS,
    CLIENT_METHOD_COUNT,
};

struct client;

/* "unix:/path" and "host:port" are addresses; anything else is not. */
bool client_endpoint_valid(const char *endpoint);

/* Does not connect: the first call does.  Asserts that the endpoint is valid; NULL when out of
 * memory. */
struct client *client_create(const struct client_options *options);
void client_destroy(struct client *client);

/* *ret_answer is the message of the method's answer type; give it to client_free(). */
bool client_call(struct client *client, enum client_method method, const ProtobufCMessage *request,
                 void *ret_answer, struct client_failure *ret_failure);

/* Called for each message of a stream; the message is freed afterwards.  false cancels the call. */
typedef bool client_message_fn(void *context, const ProtobufCMessage *message);

bool client_stream(struct client *client, enum client_method method,
                   const ProtobufCMessage *request, client_message_fn *message_fn, void *context,
                   struct client_failure *ret_failure);

void client_free(void *answer);

/* grpc.health.v1: whether the service named ("": the whole daemon) is serving. */
bool client_health(struct client *client, const char *service, bool *ret_serving,
                   struct client_failure *ret_failure);

/* The exit code a failure of this code stands for. */
enum client_exit client_exit_code(enum client_code code);

/* "sentence (REASON, field=.. limit=.. value=..)" without a newline; always ends in a zero. */
void client_failure_print(const struct client_failure *failure, char *text, size_t text_bytes);

/* Reads a token: the first word of the file, at most 256 bytes.  token_bytes > 256.  On failure
 * writes one sentence to why. */
bool client_read_token(const char *path, char *token, size_t token_bytes, char *why,
                       size_t why_bytes);
