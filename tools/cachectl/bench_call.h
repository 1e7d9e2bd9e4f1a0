#pragma once

/* The gRPC side of `cachectl bench rpc`: one client loop for both servers, and the bare echo
 * server. */

#include "tools/cachectl/bench_progress.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BENCH_ECHO_PATH "/cached.bench.v1.EchoService/Lookup"
#define BENCH_LOOKUP_PATH "/cached.session.v1.SessionService/Lookup"

struct bench_call;

/* A unary method called again and again with the same request.  NULL: no memory. */
struct bench_call *bench_call_create(const char *endpoint, const char *path, const char *token,
                                     const uint8_t *request, size_t request_bytes);
void bench_call_destroy(struct bench_call *call);

/* Calls `count` times, one after the other, and writes how long each took.  false: one failed, or
 * this program is to end. */
bool bench_call_run(struct bench_call *call, struct bench_progress *progress, uint64_t *ret_ns,
                    uint32_t count);

/* Serves BENCH_ECHO_PATH on `endpoint` until this process is killed, or its parent ends: answers
 * the first reply_bytes of each request.  Returns an exit code. */
int bench_echo_serve(const char *endpoint, size_t reply_bytes);
