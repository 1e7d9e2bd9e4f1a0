/*
 * `cachectl key rotate`: another master key, from where the daemon's configuration says it is.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

static int print_answer(const struct ctl *ctl, const Cached__Admin__V1__RotateKeyResponse *a)
{
    if (ctl->json)
        return out_json_take(json_pack("{s:b, s:s, s:s, s:I}", "rotated", a->rotated, "master_key",
                                       a->master_key, "before", a->before, "keys",
                                       (json_int_t)a->keys));
    if (a->rotated)
        (void)printf("rotated: master key %s, before it %s; %" PRIu64
                     " keys of users are under the new one\n",
                     a->master_key, a->before, a->keys);
    else
        (void)printf("nothing to do: the daemon reads master key %s, which is in use already\n",
                     a->master_key);
    return CLIENT_EXIT_OK;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Admin__V1__RotateKeyRequest request = CACHED__ADMIN__V1__ROTATE_KEY_REQUEST__INIT;
    Cached__Admin__V1__RotateKeyResponse *answer = NULL;
    struct client_failure failure;
    struct client *client = NULL;
    int code = 0;

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code == 0 && !client_call(client, CLIENT_ROTATE_KEY, &request.base, &answer, &failure))
        code = ctl_failure(&failure);
    if (code == 0) code = print_answer(ctl, answer);
    client_free(answer);
    client_destroy(client);
    return code;
}

const struct command command_key_rotate = {
    .name = "key rotate",
    .arguments = "",
    .summary = "put the keys of all users under another master key",
    .details =
        "First put the new key where ssd.master_key_file says, by rename, and keep the old one\n"
        "until this says rotated.  Stored pages are not written again: it takes one write.  From\n"
        "then on only the new key opens the state directory.  Needs a token with role ops.",
    .example = "cachectl key rotate",
    .run = run,
};
