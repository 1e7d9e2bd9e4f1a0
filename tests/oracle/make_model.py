#!/usr/bin/python3
"""make_model.py --config tiny|small|FILE.json --seed S DIR

Random weights under the released tensor names and dtypes (7.1), for runs of
the oracle without any other program.
"""
import argparse
import json
import os

import numpy as np

import quant
import safetensors
import toyconfig
from config import Config

F32 = np.float32


class Maker:
    def __init__(self, cfg, seed, strong=1.0):
        self.c, self.rng, self.out = cfg, np.random.default_rng(seed), []
        self.strong = strong                 # gain of the attention's output

    def normal(self, shape, std):
        return (self.rng.standard_normal(shape) * std).astype(F32)

    def bf16(self, name, a):
        self.out.append((name, "BF16", quant.bf16_codes(a)))

    def f32(self, name, a):
        self.out.append((name, "F32", a.astype(F32)))

    def norm(self, name, n):
        self.bf16(name + ".weight", 1 + self.normal(n, .1))

    def dense(self, name, rows, cols, gain=1.0):
        """fp8, one ue8m0 per 32x32 tile"""
        a = self.normal((rows, cols), gain / np.sqrt(cols))
        t = a.reshape(rows // 32, 32, cols // 32, 32)
        scale = quant.ue8m0_ceil(np.abs(t).max((1, 3)) / F32(448))
        v = t / quant.ue8m0_decode(scale)[:, None, :, None]
        self.out.append((name + ".weight", "F8_E4M3",
                         quant.e4m3_codes(v).reshape(rows, cols)))
        self.out.append((name + ".scale", "F8_E8M0", scale))

    def fp4(self, name, rows, cols):
        codes, scale = quant.index_quant(self.normal((rows, cols), 1 / np.sqrt(cols)))
        self.out.append((name + ".weight", "I8",
                         quant.nibbles_pack(codes).view(np.int8)))
        self.out.append((name + ".scale", "F8_E8M0", scale))

    def hc(self, name):
        n, wide = self.c.hc, self.c.hc * self.c.D
        k = n * (n + 2)
        self.f32(name + "_fn", self.normal((k, wide), 1 / np.sqrt(wide)))
        self.f32(name + "_base", self.normal(k, .5))
        self.f32(name + "_scale", 1 + self.normal(3, .1))

    def attention(self, p, layer):
        c = self.c
        self.f32(p + "attn_sink", self.normal(c.heads, .5))
        self.dense(p + "wq_a", c.q_lora, c.D)
        self.norm(p + "q_norm", c.q_lora)
        self.norm(p + "kv_norm", c.head_dim)
        self.dense(p + "wq_b", c.heads * c.head_dim, c.q_lora)
        self.dense(p + "wkv", c.head_dim, c.D)
        wide = c.heads // c.o_groups * c.head_dim
        self.dense(p + "wo_a", c.o_groups * c.o_lora, wide)
        self.dense(p + "wo_b", c.D, c.o_groups * c.o_lora, self.strong)
        if layer in c.kv_sources:
            std = 1 / np.sqrt(c.D)
            self.bf16(p + "compressor.wkv.weight", self.normal((c.head_dim, c.D), std))
            if c.ratio(layer) > 1:
                self.bf16(p + "compressor.wgate.weight",
                          self.normal((c.head_dim, c.D), std))
            self.norm(p + "compressor.norm", c.head_dim)
            self.bf16(p + "indexer.wk.weight",
                      self.normal((c.index_dim, c.head_dim), c.head_dim ** -.5))
            self.norm(p + "indexer.k_norm", c.index_dim)
        if layer in c.index_sources:
            self.dense(p + "indexer.wq_b", c.index_heads * c.index_dim, c.q_lora)
            self.bf16(p + "indexer.weights_proj.weight",
                      self.normal((c.index_heads, c.D), c.D ** -.5))

    def moe(self, p, experts):
        c = self.c
        self.bf16(p + "gate.weight", self.normal((experts, c.D), c.D ** -.5))
        self.f32(p + "gate.bias", self.normal(experts, .1))
        self.f32(p + "gate.bias_vl", self.normal(experts, .1))
        for e in range(experts):
            for k in ("w1", "w3"):
                self.fp4(p + "experts.%d.%s" % (e, k), c.moe_width, c.D)
            self.fp4(p + "experts.%d.w2" % e, c.D, c.moe_width)
        self.dense(p + "shared_experts.w1", c.moe_width, c.D, 4)   # reach the limit
        self.dense(p + "shared_experts.w3", c.moe_width, c.D, 4)
        self.dense(p + "shared_experts.w2", c.D, c.moe_width)

    def engram(self, p, rows):
        c = self.c
        codes, scale = quant.fp8_quant(self.normal((rows, c.engram_dim), 1))
        self.out.append((p + "embed.weight", "F8_E4M3", codes))
        self.out.append((p + "embed.scale", "F8_E8M0", scale))
        columns = (c.engram_ngram - 1) * c.engram_heads
        self.dense(p + "wkv", (c.hc + 1) * c.D, columns * c.engram_dim)
        self.bf16(p + "q_weight", 1 + self.normal((c.hc, c.D), .1))
        self.bf16(p + "k_weight", 1 + self.normal((c.hc, c.D), .1))

    def layer(self, n):
        c, p = self.c, self.c.prefix(n)
        draft = n >= c.layers
        self.norm(p + "attn_norm", c.D)
        self.norm(p + "ffn_norm", c.D)
        self.hc(p + "hc_attn")
        self.hc(p + "hc_ffn")
        self.attention(p + "attn.", n)
        self.moe(p + "ffn.", c.draft_experts if draft else c.experts)
        if n in c.engram_layers and not draft:
            self.engram(p + "engram.", c.engram_rows[c.engram_layers.index(n)])

    def all(self):
        c = self.c
        self.bf16("embed.weight", self.normal((c.vocab, c.D), 1))
        self.bf16("head.weight", self.normal((c.vocab, c.D), 2 * c.D ** -.5))
        self.norm("norm", c.D)
        for n in range(c.layers + c.stages):
            self.layer(n)
        last = "mtp.%d." % (c.stages - 1)
        self.dense("mtp.0.main_proj", c.D, len(c.draft_targets) * c.D)
        self.norm("mtp.0.main_norm", c.D)
        self.norm(last + "norm", c.D)
        std = c.draft_rank ** -.5
        self.bf16(last + "markov_head.embed.weight",
                  self.normal((c.vocab, c.draft_rank), 1))
        self.bf16(last + "markov_head.head.weight",
                  self.normal((c.vocab, c.draft_rank), std))
        self.bf16(last + "confidence_head.proj.weight",
                  self.normal((1, c.D + c.draft_rank), c.D ** -.5))
        return self.out


def toy_ids(vocab):
    """7.2: byte ids fold ASCII upper to lower case, numbered by appearance."""
    seen, out = {}, []
    for i in range(vocab):
        key = i + 32 if 3 + 65 <= i <= 3 + 90 else i
        out.append(seen.setdefault(key, len(seen)))
    return np.array(out, "<i4")


def make(config, seed, folder, strong=1.0):
    cfg = Config(config)
    os.makedirs(folder, exist_ok=True)
    ids = toy_ids(cfg.vocab)
    if len(set(ids)) != cfg.engram_ids:
        raise ValueError("compressed vocabulary is %d" % len(set(ids)))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=1)
    ids.tofile(os.path.join(folder, "engram_ids.bin"))
    safetensors.write(os.path.join(folder, "model.safetensors"),
                      Maker(cfg, seed, strong).all())


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--config", default="tiny")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("folder")
    a = a.parse_args()
    if a.config == "tiny":
        config = toyconfig.tiny()
    elif a.config == "small":
        config = toyconfig.small_cut()
    else:
        with open(a.config) as f:
            config = json.load(f)
    make(config, a.seed, a.folder)


if __name__ == "__main__":
    main()
