/*
 * Writes the trace format; fields and their order as in trace_file.h.
 *
 * Names are reduced to characters that need no escaping in JSON, so a line is plain printf, and the
 * same input gives the same bytes.
 */

#include "tools/cachectl/trace_file.h"

#include <inttypes.h>
#include <string.h>

static void text_write(const char *text, FILE *out)
{
    for (const char *c = text; *c != '\0'; c++) {
        const bool plain = *c >= ' ' && *c <= '~' && *c != '"' && *c != '\\';
        (void)fputc(plain ? *c : '_', out);
    }
}

void trace_header_write(const struct trace_header *header, FILE *out)
{
    (void)fputs("{\"trace\":1,\"name\":\"", out);
    text_write(header->name, out);
    (void)fprintf(out,
                  "\",\"block\":%" PRIu32 ",\"clock\":\"%s\",\"users\":\"%s\",\"tail\":%" PRIu32
                  ",\"scope\":\"%s\"",
                  header->block_tokens, header->global_clock ? "global" : "session",
                  header->real_users ? "real" : "made-up", header->tail_tokens,
                  header->global_scope ? "global" : "session");
    if (header->scale > 1) (void)fprintf(out, ",\"scale\":%" PRIu32, header->scale);
    if (header->source[0] != '\0') {
        (void)fputs(",\"source\":\"", out);
        text_write(header->source, out);
        (void)fputc('"', out);
    }
    (void)fputs("}\n", out);
}

static void ids_write(const struct trace_runs *ids, FILE *out)
{
    (void)fputs(",\"ids\":[", out);
    for (uint32_t i = 0; i < ids->run_count; i++)
        (void)fprintf(out, "%s[%" PRIu64 ",%" PRIu32 "]", i == 0 ? "" : ",", ids->runs[i].first,
                      ids->runs[i].count);
    (void)fputc(']', out);
}

void trace_turn_write(const struct trace_header *header, const struct trace_turn *turn, FILE *out)
{
    static const char *const kinds[TRACE_KIND_COUNT] = {
        [TRACE_KIND_TOOL] = "tool", [TRACE_KIND_TEXT] = "text", [TRACE_KIND_OTHER] = "other"};

    (void)fprintf(out, "{\"t\":%" PRIu64 ",\"dur\":%" PRIu64, turn->t_ms, turn->dur_ms);
    if (turn->has_gap) (void)fprintf(out, ",\"gap\":%" PRIu64, turn->gap_ms);
    (void)fprintf(out, ",\"user\":%" PRIu64 ",\"sess\":%" PRIu64, turn->user, turn->sess);
    if (turn->has_sub) (void)fprintf(out, ",\"sub\":%" PRIu64, turn->sub);
    (void)fprintf(out,
                  ",\"turn\":%" PRIu32 ",\"par\":%" PRId64 ",\"keep\":%" PRIu32 ",\"in\":%" PRIu32
                  ",\"out\":%" PRIu32,
                  turn->turn, turn->par, turn->keep_tokens, turn->in_tokens, turn->out_tokens);
    if (header->scale > 1)
        (void)fprintf(out, ",\"raw\":[%" PRIu32 ",%" PRIu32 "]", turn->raw_in_tokens,
                      turn->raw_out_tokens);
    ids_write(&turn->ids, out);
    if (turn->sys_tokens > 0)
        (void)fprintf(out, ",\"sys\":[%" PRIu64 ",%" PRIu32 "]", turn->sys_id, turn->sys_tokens);
    if (turn->kind != TRACE_KIND_UNKNOWN) (void)fprintf(out, ",\"kind\":\"%s\"", kinds[turn->kind]);
    (void)fputs("}\n", out);
}
