"""One DeepSeek V4 attention layer of transformers, and ours with its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from dynchunk import Chunks
from dynchunk.attention import Layout
from dynchunk.integrations.deepseek_v4 import attention_from_transformers

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {"csa": CSA, "hca": HCA}


class Pair:
    """The layer in transformers and here."""

    def __init__(self, kind: str, hidden: int = 256, heads: int = 4, head_dim: int = 64) -> None:
        import transformers

        config = transformers.DeepseekV4Config(
            vocab_size=64,
            hidden_size=hidden,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=heads,
            head_dim=head_dim,
            q_lora_rank=hidden // 2,
            o_groups=2,
            o_lora_rank=hidden // 4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            layer_types=[KINDS[kind]],
            mlp_layer_types=["moe"],
            # With few, many scores are zero, and transformers orders ties as it likes.
            index_n_heads=16,
            index_head_dim=32,
            index_topk=512,
            max_position_embeddings=1 << 17,
            attn_implementation="eager",
        )
        self.model = transformers.DeepseekV4ForCausalLM(config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        self.layer = self.model.model.layers[0].self_attn
        self.ours = attention_from_transformers(self.layer).eval()
        self.stride = config.compress_rates[KINDS[kind]]

    def theirs_work(self, x: Tensor) -> Callable[[], Tensor]:
        """Return their layer on hidden states [T, hidden], with what their model gives it."""
        given: dict[str, object] = {}

        def record(module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            given.update(kwargs)
            raise _RecordedError

        hook = self.layer.register_forward_pre_hook(record, with_kwargs=True)
        with suppress(_RecordedError):
            self.model.model(inputs_embeds=x[None], use_cache=False)
        hook.remove()
        given["hidden_states"] = x[None]

        @torch.no_grad()
        def work() -> Tensor:
            return self.layer(**given)[0][0]

        return work

    def ours_work(self, x: Tensor) -> Callable[[], Tensor]:
        """Return our layer on the same, the layout included."""

        @torch.no_grad()
        def work() -> Tensor:
            layout = Layout.of(self.ours.policy, Chunks.fixed(self.stride, len(x)))
            return self.ours(x, layout).out

        return work


class _RecordedError(Exception):
    pass
