/* Sessions that a directory to be damaged begins with. */

#include "tests/crash/damage.h"

void cr_stock(struct cr_writer *writer)
{
    struct cr_session *session = cr_session_add(writer);
    const uint32_t vocab = cr_oracle_vocab(writer->oracle);
    const uint32_t turns = ex_random_between(&writer->random, 2, 3);
    struct client *client = ex_daemon_client(writer->run->daemon, writer->user, writer->index);
    char why[EX_WHY_BYTES];
    if (!ex_call_open(client, session->name, why)) {
        cr_fail(writer, CR_WRONG, session, NULL, "while preparing: %.300s", why);
        return;
    }
    session->opened = true;
    for (uint32_t turn = 0; turn < turns; turn++) {
        struct ex_prefill_answer answer;
        const uint32_t more = ex_random_between(&writer->random, turn == 0 ? 40 : 8, 120);
        for (uint32_t i = 0; i < more; i++)
            session->talk[session->talk_count++] = ex_random_below(&writer->random, vocab - 8);
        const struct ex_prefill call = {.session = session->name,
                                        .ids = session->talk,
                                        .count = session->talk_count,
                                        .level = EX_LEVEL_SSD};
        if (!ex_call_prefill(client, &call, &answer, why)) {
            cr_fail(writer, CR_WRONG, session, NULL, "while preparing: %.300s", why);
            return;
        }
        for (uint32_t i = 0; i < answer.point_count; i++)
            cr_learn(writer, session, &answer.points[i], session->talk, session->talk_count);
    }
    struct cr_point *last = &session->points[session->point_count - 1];
    cr_oracle_crcs(writer->oracle, last->ids, last->position + CR_SUFFIX,
                   last->position + CR_SUFFIX + CR_ANSWER - 1, last->crcs);
}
