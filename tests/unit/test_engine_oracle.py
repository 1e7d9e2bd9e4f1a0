#!/usr/bin/python3
"""A second implementation of the model, written from its specification, compared bit for bit.

It shares nothing with engine/ but the order of sums and the polynomial of exp, so equal bits mean
that both read the specification the same way: layer sequence, compressor, indexer, candidates,
routing, hyper-connections, quantizers, row formats, the decoder's tail.  It is slow and needs numpy,
so it is run by hand:

    mkmodel --seed 7 --out /tmp/tiny
    test_engine_cpu /tmp/tiny 150 /tmp/tiny.dump
    test_engine_oracle.py /tmp/tiny 150 /tmp/tiny.dump

The checksums in test_engine_cpu.c are those of a run that agreed.  Only `tiny` is understood.
"""
import json
import math
import sys

import numpy as np

F = np.float32
HIDDEN, HEADS, HEAD_DIM, ROPE, WINDOW = 128, 4, 64, 16, 16
LAYERS, ENCODER, TOPK, BLOCKS, BLOCK = 16, 8, 16, 4, 8
ROW_SOURCES = [2, 4, 6, 8]
LIST_SOURCES = [2, 4, 6, 8, 10, 12, 14]
IMAGE_ID = 510
PAGE_BYTES, WINDOW_ROWS = 20480, 32


# ---- Numbers. ----

def bf16(x):
    bits = np.ascontiguousarray(x, dtype=F).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000).astype(np.uint32).view(F)


def e4m3(codes):
    codes = codes.astype(np.int64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8.0) * 2.0**(exponent - 7.0))
    return np.where(codes & 128, -value, value).astype(F)


def power(codes):
    return (2.0**(codes.astype(float) - 127)).astype(F)


E4M3 = np.array([float(e4m3(np.array([code]))[0]) for code in range(127)])
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4_SIGNED = np.concatenate([FP4, -FP4]).astype(F)


def nearest(x, values):
    """Code of the nearest value; a tie goes to the even code."""
    x = np.abs(x.astype(np.float64))
    high = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    below, above = x - values[high - 1], values[high] - x
    even = np.where((high - 1) % 2 == 0, high - 1, high)
    return np.where(below < above, high - 1, np.where(above < below, high, even))


def next_power(x):
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(1.0, np.where(fraction == 0.5, exponent - 1, exponent)).astype(F)


def signed(codes, values, like):
    return values[codes].astype(F) * np.where(np.signbit(like), F(-1), F(1))


def quantize_fp8(x):
    groups = x.reshape(x.shape[:-1] + (-1, 32))
    scale = next_power(np.maximum(np.abs(groups).max(-1), F(1e-4)) / F(448))[..., None]
    return (signed(nearest(groups / scale, E4M3), E4M3, groups) * scale).reshape(x.shape)


def quantize_fp4(x, group, scale_of):
    groups = x.reshape(x.shape[:-1] + (-1, group))
    scale = scale_of(np.abs(groups).max(-1))[..., None]
    codes = nearest(np.clip(groups / scale, -6, 6), FP4)
    return (signed(codes, FP4, groups) * scale).reshape(x.shape)


def quantize_main(x):
    def scale(amax):
        return E4M3[nearest(np.maximum(amax, F(6 * 2**-9)) / F(6), E4M3)].astype(F)
    return quantize_fp4(x, 16, scale)


def quantize_index(x):
    return quantize_fp4(x, 32, lambda amax: next_power(np.maximum(amax, F(6 * 2.0**-126)) / F(6)))


def exp(x):
    x = np.asarray(x, F)
    number = float.fromhex
    magic = F(number('0x1.8p23'))
    clamped = np.clip(x, F(-87), F(88))
    n = (clamped * F(number('0x1.715476p0')) + magic) - magic
    r = (clamped - n * F(number('0x1.62e4p-1'))) - n * F(number('0x1.7f7d1cp-20'))
    p = F(number('0x1.6c16c2p-10'))
    for c in ('0x1.111112p-7', '0x1.555556p-5', '0x1.555556p-3', '0x1p-1', '0x1p0', '0x1p0'):
        p = p * r + F(number(c))
    return np.where(x < -87, F(0), p * np.ldexp(F(1), n.astype(int)).astype(F)).astype(F)


def sigmoid(x):
    return (F(1) / (F(1) + exp(-x))).astype(F)


def matmul(x, weights):
    """Sums in order of k."""
    total = np.zeros(len(weights), F)
    for k in range(weights.shape[1]):
        total = total + x[k] * weights[:, k]
    return total


def lanes_sum(products):
    """16 lanes, then halves onto halves."""
    total = np.zeros(products.shape[:-1] + (16,), F)
    for at in range(0, products.shape[-1], 16):
        total = total + products[..., at:at + 16]
    half = 8
    while half:
        total = total[..., :half] + total[..., half:2 * half]
        half //= 2
    return total[..., 0]


def rms_inverse(x):
    return (F(1) / np.sqrt(lanes_sum(x * x) / F(x.shape[-1]) + F(1e-20))).astype(F)


def rms(x, weight):
    return bf16((x * rms_inverse(x)[..., None]) * weight)


# ---- Weights. ----

class Weights:
    def __init__(self, path):
        with open(path, 'rb') as file:
            raw = file.read()
        end = 8 + int.from_bytes(raw[:8], 'little')
        self.header, self.data, self.cache = json.loads(raw[8:end]), raw[end:], {}

    def plain(self, name):
        entry = self.header[name]
        first, last = entry['data_offsets']
        data = self.data[first:last]
        if entry['dtype'] == 'F32':
            return np.frombuffer(data, F).reshape(entry['shape'])
        if entry['dtype'] == 'BF16':
            bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            return bits.view(F).reshape(entry['shape'])
        return np.frombuffer(data, np.uint8).reshape(entry['shape'])

    def scaled(self, name):
        if name in self.cache:
            return self.cache[name]
        codes, scale = self.plain(name + '.weight'), power(self.plain(name + '.scale'))
        if self.header[name + '.weight']['dtype'] == 'I8':
            values = np.empty((codes.shape[0], 2 * codes.shape[1]), F)
            values[:, 0::2], values[:, 1::2] = FP4_SIGNED[codes & 15], FP4_SIGNED[codes >> 4]
            values = values * np.repeat(scale, 32, 1)
        else:
            values = e4m3(codes) * np.repeat(np.repeat(scale, 32, 0), 32, 1)
        self.cache[name] = values.astype(F)
        return self.cache[name]


# ---- Rotary. ----

def frequencies(theta, yarn):
    def dim(turns):
        return ROPE * math.log(64 / (2 * math.pi * turns)) / (2 * math.log(theta))
    low, high = max(math.floor(dim(32)), 0), min(math.ceil(dim(1)), ROPE - 1)
    result = []
    for i in range(ROPE // 2):
        f = F(1) / F(float(F(theta))**float(F(2 * i) / F(ROPE)))
        if yarn:
            ramp = F(min(max((i - low) / max(high - low, 0.001), 0), 1))
            f = f / F(16) * ramp + f * (F(1) - ramp)
        result.append(f)
    return np.array(result, F)


PLAIN, YARN = frequencies(1e4, False), frequencies(1.6e5, True)


def rotate(x, position, table, inverse=False):
    angle = (F(position) * table).astype(F).astype(np.float64)
    c, s = np.cos(angle).astype(F), np.sin(angle).astype(F)
    s = -s if inverse else s
    y = x.copy()
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1::2]
    y[..., -ROPE::2], y[..., -ROPE + 1::2] = bf16(even * c - odd * s), bf16(odd * c + even * s)
    return y


# ---- Layers. ----

class Model:
    def __init__(self, directory):
        self.w = Weights(directory + '/model.safetensors')
        self.window = [{} for _ in range(LAYERS)]
        self.main = {source: {} for source in ROW_SOURCES}
        self.index = {source: {} for source in ROW_SOURCES}
        self.half = {}

    def mixes(self, streams, name):
        v = streams.reshape(-1)
        scale = np.repeat(self.w.plain(name + '_scale'), [4, 4, 16])
        z = matmul(v, self.w.plain(name + '_fn')) * rms_inverse(v) * scale
        z = z + self.w.plain(name + '_base')
        rows = z[8:].reshape(4, 4)
        e = exp(rows - rows.max(1, keepdims=True))
        total = np.zeros((4, 1), F)
        for j in range(4):
            total = total + e[:, j:j + 1]
        m = e / total + F(1e-6)
        for n in range(20):
            if n > 0:
                m = m / (((m[:, 0] + m[:, 1]) + m[:, 2]) + m[:, 3] + F(1e-6))[:, None]
            m = m / (((m[0] + m[1]) + m[2]) + m[3] + F(1e-6))
        return sigmoid(z[:4]) + F(1e-6), F(2) * sigmoid(z[4:8]), m

    @staticmethod
    def collapse(streams, mix):
        y = mix[0] * streams[0]
        for i in range(1, 4):
            y = y + mix[i] * streams[i]
        return bf16(y)

    @staticmethod
    def expand(streams, out, post, comb):
        result = np.empty_like(streams)
        for j in range(4):
            v = post[j] * out
            for i in range(4):
                v = v + comb[i, j] * streams[i]
            result[j] = bf16(v)
        return result

    def write_rows(self, x, layer, position):
        name = 'layers.%d.attn.' % layer
        norm = self.w.plain(name + 'compressor.norm.weight')
        a = matmul(x, self.w.plain(name + 'compressor.wkv.weight'))
        if layer == ENCODER:
            latent, entry, ratio = rms(bf16(a), norm), position, 1
        else:
            b = matmul(x, self.w.plain(name + 'compressor.wgate.weight'))
            if position % 2 == 0:
                self.half[layer] = (a, b)
                return
            a0, b0 = self.half[layer]
            top = np.maximum(b0, b)
            e0, e1 = exp(b0 - top), exp(b - top)
            latent = rms(bf16(e0 / (e0 + e1) * a0 + e1 / (e0 + e1) * a), norm)
            entry, ratio = position // 2, 2
        key = rms(bf16(matmul(latent, self.w.plain(name + 'indexer.wk.weight'))),
                  self.w.plain(name + 'indexer.k_norm.weight'))
        self.index[layer][entry] = quantize_index(rotate(key, entry * ratio, YARN))
        self.main[layer][entry] = quantize_main(rotate(latent, entry * ratio, YARN))

    def choose(self, x, qr, layer, source, position, token):
        name = 'layers.%d.attn.indexer.' % layer
        seen = (position + 1) // (1 if source == ENCODER else 2)
        q = bf16(matmul(qr, self.w.scaled(name + 'wq_b'))).reshape(2, 32)
        q = quantize_index(rotate(q, position, YARN))
        w = bf16(matmul(x, self.w.plain(name + 'weights_proj.weight'))) * F(1 / 8)
        score = np.zeros(seen, F)
        for j in range(seen):
            dots = [F((q[h].astype(float) * self.index[source][j]).sum()) for h in range(2)]
            score[j] = F(w[0] * max(dots[0], F(0))) + F(w[1] * max(dots[1], F(0)))
        if layer == ENCODER:
            best = [score[at:at + BLOCK].max() for at in range(0, seen, BLOCK)]
            best[(seen - 1) // BLOCK] = np.inf
            token['blocks'] = sorted(range(len(best)), key=lambda b: (-best[b], b))[:BLOCKS]
        entries = range(seen)
        if layer > ENCODER:
            entries = [j for j in entries if j // BLOCK in token['blocks']]
        token['list'] = sorted(sorted(entries, key=lambda j: (-score[j], j))[:TOPK])

    def attention(self, x, layer, position, clip, token, write):
        name = 'layers.%d.attn.' % layer
        table = PLAIN if layer < 2 else YARN
        xq = quantize_fp8(x)
        qr = rms(bf16(matmul(xq, self.w.scaled(name + 'wq_a'))), self.w.plain(name + 'q_norm.weight'))
        qr = quantize_fp8(qr)
        q = rotate(bf16(matmul(qr, self.w.scaled(name + 'wq_b'))).reshape(HEADS, HEAD_DIM), position,
                   table)
        kv = rms(bf16(matmul(xq, self.w.scaled(name + 'wkv'))), self.w.plain(name + 'kv_norm.weight'))
        self.window[layer][position] = quantize_fp8(rotate(kv, position, table))
        if layer in ROW_SOURCES and write:
            self.write_rows(x, layer, position)
        keys = [self.window[layer][p]
                for p in range(max(clip, position - WINDOW + 1), position + 1)]
        if layer >= 2:
            source = max(s for s in ROW_SOURCES if s <= layer)
            if layer in LIST_SOURCES:
                self.choose(x, qr, layer, source, position, token)
            keys += [self.main[source][j] for j in token['list']]
        o = self.softmax(q, np.array(keys), self.w.plain(name + 'attn_sink'))
        o = rotate(bf16(o), position, table, inverse=True).reshape(2, -1)
        wo_a = self.w.scaled(name + 'wo_a').reshape(2, 32, -1)
        z = np.concatenate([bf16(matmul(o[g], wo_a[g])) for g in range(2)])
        return bf16(matmul(quantize_fp8(z), self.w.scaled(name + 'wo_b')))

    @staticmethod
    def softmax(q, keys, sink):
        """At most 32 columns, so one block of 64: no running maximum."""
        o = np.zeros((HEADS, HEAD_DIM), F)
        for h in range(HEADS):
            s = (lanes_sum(q[h][None] * keys) * F(0.125)).astype(F)
            top = max(F(-1e30), s.max())
            p = exp(s - top)
            total = F(0)
            for value in p:
                total = F(total + value)
            total = F(total + exp(np.array(sink[h] - top)))
            out = np.zeros(HEAD_DIM, F)
            for value, key in zip(bf16(p), keys):
                out = out + value * key
            o[h] = out / total
        return o

    def experts(self, x, layer, token_id):
        name = 'layers.%d.ffn.' % layer
        raw = matmul(x, self.w.plain(name + 'gate.weight')).astype(float)
        soft = [v + math.log1p(math.exp(-v)) if v > 0 else math.log1p(math.exp(v)) for v in raw]
        score = np.sqrt(np.array(soft).astype(F)).astype(F)
        bias = self.w.plain(name + ('gate.bias_vl' if token_id == IMAGE_ID else 'gate.bias'))
        order = score + bias
        chosen = sorted(sorted(range(8), key=lambda e: (-order[e], e))[:2])
        total = F(score[chosen[0]] + score[chosen[1]]) + F(1e-20)
        xq = quantize_fp8(x)

        def run(prefix, weight):
            gate = np.minimum(bf16(matmul(xq, self.w.scaled(prefix + 'w1'))), F(10))
            up = np.clip(bf16(matmul(xq, self.w.scaled(prefix + 'w3'))), F(-10), F(10))
            h = bf16((gate / (F(1) + exp(-gate)) * up) * weight)
            return bf16(matmul(quantize_fp8(h), self.w.scaled(prefix + 'w2')))

        y = np.zeros(HIDDEN, F)
        for e in chosen:
            y = y + run(name + 'experts.%d.' % e, F(score[e] / total * F(1.5)))
        return bf16(y + run(name + 'shared_experts.', F(1)))

    def block(self, state, layer, position, clip, token, token_id, write):
        streams, mix = state
        name = 'layers.%d.' % layer
        pre, post, comb = self.mixes(streams, name + 'hc_attn')
        x = rms(self.collapse(streams, mix), self.w.plain(name + 'attn_norm.weight'))
        out = self.attention(x, layer, position, clip, token, write)
        streams = self.expand(streams, out, post, comb)
        next_pre, post, comb = self.mixes(streams, name + 'hc_ffn')
        x = rms(self.collapse(streams, pre), self.w.plain(name + 'ffn_norm.weight'))
        return self.expand(streams, self.experts(x, layer, token_id), post, comb), next_pre

    def prefill(self, ids):
        encoded = []
        for position, token_id in enumerate(ids):
            state = (np.repeat(self.w.plain('embed.weight')[token_id][None], 4, 0),
                     np.array([1, 0, 0, 0], F))
            token = {}
            for layer in range(ENCODER):
                state = self.block(state, layer, position, 0, token, token_id, True)
            norm = self.w.plain('layers.%d.attn_norm.weight' % ENCODER)
            self.write_rows(rms(self.collapse(*state), norm), ENCODER, position)
            encoded.append(state)
        clip = max(0, len(ids) - WINDOW)
        for position in range(clip, len(ids)):
            state, token = encoded[position], {}
            for layer in range(ENCODER, LAYERS):
                state = self.block(state, layer, position, clip, token, ids[position], False)
        return matmul(rms(self.collapse(*state), self.w.plain('norm.weight')),
                      self.w.plain('head.weight'))


# ---- Comparison. ----

def window_row(row):
    return e4m3(row[:64]) * np.repeat(power(row[64:66]), 32)


def fp4_row(row, count, scales):
    values = np.empty(count, F)
    values[0::2], values[1::2] = FP4_SIGNED[row[:count // 2] & 15], FP4_SIGNED[row[:count // 2] >> 4]
    return values * np.repeat(scales, count // len(scales))


def compare(model, logits, dump, count):
    """Returns how many of how many rows and logits differ."""
    dump = np.frombuffer(dump, np.uint8)
    pages = (count + 127) // 128
    image = dump[pages * PAGE_BYTES:]
    base, clip = max(0, count - WINDOW_ROWS), max(0, count - WINDOW)
    differ = total = 0

    def check(a, b):
        nonlocal differ, total
        total += 1
        differ += not np.array_equal(a, b)

    for layer in range(LAYERS):
        for p in range(base if layer < ENCODER else clip, count):
            at = 256 + (layer * WINDOW_ROWS + p - base) * 66
            check(window_row(image[at:at + 66]), model.window[layer][p])
    offset = 768
    for source in ROW_SOURCES:
        ratio = 1 if source == ENCODER else 2
        per_page = 128 // ratio
        for j in range(count // ratio):
            page = dump[j // per_page * PAGE_BYTES:]
            main = page[offset + j % per_page * 36:][:36]
            index = page[offset + per_page * 36 + j % per_page * 17:][:17]
            check(fp4_row(main, 64, e4m3(main[32:])), model.main[source][j])
            check(fp4_row(index, 32, power(index[16:])), model.index[source][j])
        offset += per_page * (36 + 17)
    for got, want in zip(image[-4 * 512:].view(F), logits):
        check(got, want)
    return differ, total


def main():
    if len(sys.argv) != 4:
        sys.exit('usage: test_engine_oracle.py MODEL_DIR TOKENS DUMP')
    count = int(sys.argv[2])
    ids = [(i * 2654435761 % 2**32 >> 20) % 509 for i in range(count)]
    if count > 30:
        ids[30] = IMAGE_ID
    model = Model(sys.argv[1])
    logits = model.prefill(ids)
    with open(sys.argv[3], 'rb') as file:
        differ, total = compare(model, logits, file.read(), count)
    print('%d of %d rows and logits differ' % (differ, total))
    sys.exit(1 if differ or not total else 0)


main()
