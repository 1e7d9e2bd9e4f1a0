#pragma once

/* From what came with a failed call to struct client_failure; private to tools/client/. */

#include "tools/client/client.h"

/* details: the serialized google.rpc.Status, or count 0.  Whatever is malformed in it is left out:
 * the code and the sentence are still worth showing. */
void client_failure_fill(struct client_failure *failure, int code, const char *text,
                         const uint8_t *details, size_t details_bytes);
