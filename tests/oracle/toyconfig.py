"""Toy configurations (7.2) as config.json in the released field names."""
import engram


def _config(t):
    rows = engram.buckets(t["engram_vocab_size"], t["engram_layer_ids"],
                          4, t["engram_n_heads"])
    t["engram_num_embeddings"] = [sum(rows[l]) for l in t["engram_layer_ids"]]
    base = {
        "model_type": "deepseek_v41_text", "num_key_value_heads": 1,
        "n_shared_experts": 1, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
        "max_position_embeddings": 1048576,
        "engram_max_ngram_size": 4, "engram_pad_token_id": 2,
        "expert_dtype": "fp4",
    }
    base.update(t)
    return {
        "model_type": "deepseek_v41", "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 2, "image_token_id": base["vocab_size"] - 2,
        "text_config": base,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic",
            "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
            "expert_dtype": "fp4"},
    }


def _yarn(original):
    return {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": original}


def tiny():
    return _config({
        "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 16,
        "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16,
        "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32,
        "sliding_window": 16,
        "compress_ratios": [0, 0] + [2] * 6 + [1] * 8 + [0] * 3,
        "kv_source_layer_ids": [2, 4, 6, 8],
        "index_source_layer_ids": [2, 4, 6, 8, 10, 12, 14],
        "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
        "candidate_source_layer_id": 8, "candidate_topk_blocks": 4,
        "candidate_block_size": 8, "rope_scaling": _yarn(64),
        "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "engram_layer_ids": [1, 6],
        "engram_n_heads": 2, "engram_head_dim": 32, "engram_vocab_size": 257,
        "engram_compressed_vocab_size": 486, "num_nextn_predict_layers": 3,
        "dspark_block_size": 3, "dspark_noise_token_id": 511,
        "dspark_target_layer_ids": [13, 14, 15], "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8, "dspark_num_experts_per_tok": 2,
    })


def small_cut():
    """`small` with fewer layers of the same roles; row sizes of production."""
    return _config({
        "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 4, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 2 + [1] * 4 + [0] * 3,
        "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 8, "index_head_dim": 128, "index_topk": 64,
        "candidate_source_layer_id": 4, "candidate_topk_blocks": 16,
        "candidate_block_size": 8, "rope_scaling": _yarn(65536),
        "n_routed_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "engram_layer_ids": [1, 2],
        "engram_n_heads": 2, "engram_head_dim": 64, "engram_vocab_size": 8191,
        "engram_compressed_vocab_size": 486, "num_nextn_predict_layers": 3,
        "dspark_block_size": 5, "dspark_noise_token_id": 511,
        "dspark_target_layer_ids": [5, 6, 7], "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 6, "dspark_num_experts_per_tok": 2,
    })
