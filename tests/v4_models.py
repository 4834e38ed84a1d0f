"""Tiny random DeepSeek V4 models of transformers."""

import torch

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


def tiny(csa, hca, window, index_heads=8, topk=3, layers=(SLIDING, CSA, HCA), yarn=True, **more):
    """A random model whose biases, norms and sinks all matter."""
    import transformers

    rope = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 32}
    options = {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": list(layers),
        "mlp_layer_types": ["moe"] * len(layers),
        "compress_rates": {CSA: csa, HCA: hca},
        "sliding_window": window,
        "index_n_heads": index_heads,
        "index_head_dim": 8,
        "index_topk": topk,
        "rope_parameters": rope if yarn else None,
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
    }
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**(options | more)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()
