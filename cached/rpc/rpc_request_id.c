/*
 * What makes two calls the same one: every field of their messages.
 *
 * The descriptor of a message says what its fields are, so a field that is added to a .proto file
 * is compared without a line here.  Numbers are kept as they are, because the answer can then name
 * both; of texts, bytes and lists there is a part of their SHA-256, which is no copy of a prompt.
 */

#include "cached/rpc/rpc_request_id.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

static bool check_form(struct request *req, const char *id)
{
    const size_t count = strlen(id);
    bool good = count <= KV_REQUEST_ID_MAX;
    for (size_t i = 0; good && i < count; i++)
        good = id[i] > 0x20 && id[i] < 0x7f;
    if (good) return true;
    request_fail(req, KV_REASON_REQUEST_ID_INVALID, "request_id", "1 to 64 printable bytes",
                 request_u64(req, count), NULL);
    return false;
}

static uint64_t digest_of(const void *data, size_t bytes)
{
    struct kv_digest digest;
    kv_sha256(data, bytes, &digest);
    return kv_load64(digest.bytes);
}

/* Bytes of one value as protobuf-c has it in memory. */
static size_t value_bytes(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    default:
        return 4;
    }
}

static struct request_field note_list(const uint8_t *at, const ProtobufCMessage *message,
                                      const ProtobufCFieldDescriptor *type)
{
    size_t count;
    const void *values;
    memcpy(&count, (const uint8_t *)message + type->quantifier_offset, sizeof(count));
    memcpy(&values, at, sizeof(values));
    return (struct request_field){
        .name = type->name,
        .value = count == 0 ? 0 : digest_of(values, count * value_bytes(type->type)),
    };
}

static struct request_field note_value(const ProtobufCMessage *message,
                                       const ProtobufCFieldDescriptor *type)
{
    const uint8_t *at = (const uint8_t *)message + type->offset;
    struct request_field field = {.name = type->name};
    if (type->label == PROTOBUF_C_LABEL_REPEATED) return note_list(at, message, type);
    if (type->type == PROTOBUF_C_TYPE_STRING) {
        const char *text;
        memcpy(&text, at, sizeof(text));
        field.value = digest_of(text, strlen(text));
    } else if (type->type == PROTOBUF_C_TYPE_BYTES) {
        ProtobufCBinaryData data;
        memcpy(&data, at, sizeof(data));
        field.value = digest_of(data.data, data.len);
    } else {
        assert(type->type != PROTOBUF_C_TYPE_MESSAGE); /* No request holds one. */
        /* A float is compared by its bits and not told as a number. */
        field.is_number =
            type->type != PROTOBUF_C_TYPE_FLOAT && type->type != PROTOBUF_C_TYPE_DOUBLE;
        memcpy(&field.value, at, value_bytes(type->type));
    }
    return field;
}

bool rpc_request_id_take(struct request *req, const ProtobufCMessage *message, uint32_t token_field,
                         struct request_tokens tokens)
{
    const ProtobufCMessageDescriptor *type = message->descriptor;
    const ProtobufCFieldDescriptor *own =
        protobuf_c_message_descriptor_get_field_by_name(type, "request_id");
    const char *id;
    if (own == NULL) return true;
    memcpy(&id, (const uint8_t *)message + own->offset, sizeof(id));
    if (!check_form(req, id)) return false;
    if (id[0] == '\0') return true;

    struct request_field *fields = kv_arena_alloc(req->arena, type->n_fields * sizeof(*fields));
    if (fields == NULL) {
        request_fail(req, KV_REASON_QUEUE_FULL, "request_id", NULL, NULL,
                     "No memory for the fields of the call.");
        return false;
    }
    uint32_t count = 0;
    for (unsigned i = 0; i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];
        if (field == own || strcmp(field->name, "session_id") == 0) continue;
        if (field->id == token_field)
            fields[count++] = (struct request_field){
                .name = field->name,
                .value = digest_of(tokens.ids, sizeof(*tokens.ids) * tokens.count),
            };
        else
            fields[count++] = note_value(message, field);
    }
    assert(count <= KV_REQUEST_FIELDS_MAX);
    req->in.request_id = id;
    req->in.fields = fields;
    req->in.field_count = count;
    return true;
}
