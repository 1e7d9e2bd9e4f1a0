"""config.json (1.1, Hugging Face names) and the weights by released name (7.1)."""
import json
import os

import numpy as np

import quant
import safetensors

F32, F64 = np.float32, np.float64
ACC = [F64]          # type that free sums run in; the self test also uses F32


class Config:
    def __init__(self, raw):
        t = raw.get("text_config", raw)
        self.raw = raw

        def pick(name, default=None):
            if name in t:
                return t[name]
            if name in raw:
                return raw[name]
            if default is None:
                raise KeyError("config.json: no " + name)
            return default

        self.vocab = pick("vocab_size")
        self.D = pick("hidden_size")
        self.layers = pick("num_hidden_layers")
        self.heads = pick("num_attention_heads")
        self.head_dim = pick("head_dim")
        self.rope_dim = pick("qk_rope_head_dim")
        self.q_lora = pick("q_lora_rank")
        self.o_groups = pick("o_groups")
        self.o_lora = pick("o_lora_rank")
        self.window = pick("sliding_window")
        self.ratios = list(pick("compress_ratios"))
        self.kv_sources = list(pick("kv_source_layer_ids"))
        self.index_sources = list(pick("index_source_layer_ids"))
        self.index_heads = pick("index_n_heads")
        self.index_dim = pick("index_head_dim")
        self.topk = pick("index_topk")
        self.cand_source = pick("candidate_source_layer_id")
        self.cand_blocks = pick("candidate_topk_blocks")
        self.cand_size = pick("candidate_block_size")
        self.theta = pick("rope_theta")
        self.compress_theta = pick("compress_rope_theta")
        self.scaling = pick("rope_scaling")
        self.active = pick("num_experts_per_tok")
        self.experts = pick("n_routed_experts")
        self.moe_width = pick("moe_intermediate_size")
        self.route_scale = pick("routed_scaling_factor")
        self.swiglu_limit = pick("swiglu_limit")
        self.eps = F32(pick("rms_norm_eps"))
        self.hc = pick("hc_mult")
        self.hc_iters = pick("hc_sinkhorn_iters")
        self.hc_eps = F32(pick("hc_eps"))
        self.engram_layers = list(pick("engram_layer_ids"))
        self.engram_rows = list(pick("engram_num_embeddings"))
        self.engram_ngram = pick("engram_max_ngram_size")
        self.engram_heads = pick("engram_n_heads")
        self.engram_dim = pick("engram_head_dim")
        self.engram_base = pick("engram_vocab_size")
        self.engram_ids = pick("engram_compressed_vocab_size")
        self.engram_pad = pick("engram_pad_token_id", raw.get("pad_token_id", 2))
        self.image_id = pick("image_token_id", -1)
        self.stages = pick("num_nextn_predict_layers")
        self.draft_block = pick("dspark_block_size")
        self.draft_noise = pick("dspark_noise_token_id")
        self.draft_targets = list(pick("dspark_target_layer_ids"))
        self.draft_rank = pick("dspark_markov_rank")
        self.draft_experts = pick("dspark_n_routed_experts")
        self.draft_active = pick("dspark_num_experts_per_tok")
        # The row source that ends the encoder: the first decoder layer.
        self.first_decoder = self.kv_sources[-1]
        if self.cand_source != self.first_decoder:
            raise ValueError("candidate source is not the last kv source")
        if (self.cand_blocks - 1) * self.cand_size + 1 < self.topk:
            raise ValueError("candidates too few for the top-k (2.6)")

    def ratio(self, layer):
        return self.ratios[layer] if layer < len(self.ratios) else 0

    def kv_source(self, layer):
        """1.2: source(L) = max(s in list, s <= L)"""
        return max(s for s in self.kv_sources if s <= layer)

    def index_source(self, layer):
        return max(s for s in self.index_sources if s <= layer)

    def prefix(self, layer):
        n = self.layers
        return "layers.%d." % layer if layer < n else "mtp.%d." % (layer - n)


def load_config(folder):
    with open(os.path.join(folder, "config.json")) as f:
        return Config(json.load(f))


class Weights:
    """Values by released name, as float32; matrices also in the sum's type."""

    def __init__(self, folder):
        self.store = safetensors.Folder(folder)
        self.cache = {}

    def value(self, name):
        """The tensor `name` (with its .scale sibling, when it has one)."""
        if name not in self.cache:
            self.cache[name] = self._load(name)
        return self.cache[name]

    def _load(self, name):
        dtype, raw = self.store.dtype(name), self.store.get(name)
        if dtype == "BF16":
            return quant.bf16_decode(raw)
        if dtype == "F32":
            return raw
        scale = self.store.get(name[:-len("weight")] + "scale")
        if dtype == "F8_E4M3":
            return quant.weight_fp8(raw, scale)
        if dtype == "I8":
            return quant.weight_fp4(raw, scale)
        raise ValueError("%s: dtype %s" % (name, dtype))

    def matrix(self, name):
        """[in, out] in the type that sums run in."""
        key = (name, ACC[0])
        if key not in self.cache:
            self.cache[key] = np.ascontiguousarray(self.value(name).T.astype(ACC[0]))
            self.cache.pop(name, None)
        return self.cache[key]

    def rows(self, name, index):
        """Rows of a quantized table with one scale per 32 columns (Engram)."""
        for key, n in ((name, name), (name + "/s", name[:-6] + "scale")):
            if key not in self.cache:
                self.cache[key] = self.store.get(n)
        return quant.fp8_dequant(self.cache[name][index],
                                 self.cache[name + "/s"][index])


def dot(x, matrix):
    """x [..., in] . matrix [in, out] -> float32; the order is free (2.11)."""
    flat = x.reshape(-1, x.shape[-1]).astype(ACC[0])
    return (flat @ matrix).astype(F32).reshape(x.shape[:-1] + (matrix.shape[1],))


def total(x, axis=-1):
    """A sum whose order is free."""
    return np.sum(x, axis=axis, dtype=ACC[0]).astype(F32)
