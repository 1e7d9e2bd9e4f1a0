/*
 * Drafting: the generic side, which checks what may be asked for.
 *
 * A draft is verified by a tokens run of `first` and the drafts; what is kept of it is what the
 * model would have sampled, so drafting changes speed and nothing else.
 */

#include "engine/backend/backend.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

uint32_t eng_model_draft_max(const struct eng_model *model)
{
    if (model->ops->draft == NULL || model->config.draft_stages == 0) return 0;
    return KV_MIN(model->config.draft_block, model->verify_max - 1);
}

void eng_draft(struct eng_model *model, const struct eng_draft_item *items, uint32_t count)
{
    assert(model->ops->draft != NULL && model->config.draft_stages > 0);
    for (uint32_t i = 0; i < count; i++) {
        const struct eng_session *session = items[i].session;
        assert(session->model == model);
        assert(!session->run.active);
        assert(session->has_windows && session->tokens > 0);
        assert(items[i].first < model->layout.vocab_tokens);
        assert(items[i].max >= 1 && items[i].max <= model->config.draft_block);
    }
    model->ops->draft(model, items, count);
}
