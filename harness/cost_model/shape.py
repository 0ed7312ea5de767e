"""Parameters, operations and bytes of a model, from its shape alone: pure arithmetic on `harness.config.ModelConfig`.

Operations are floating-point operations, a multiplication and an addition counted as two. A mixture of experts holds
`experts` feed-forward networks in each layer, and a token goes through `active_experts` of them."""

from harness.config import ModelConfig, TrainingConfig


def parameters(model: ModelConfig) -> int:
    """Weights in all, every expert's too; tied embeddings count once."""
    norms = model.layers * _norms(model) + model.hidden
    embeddings = 0 if model.tied_embeddings else head_parameters(model)
    return matmul_parameters(model) + embeddings + norms + model.layers * _biases(model)


def _norms(model: ModelConfig) -> int:
    """Parameters of one layer's norms."""
    return 2 * model.head_dim * model.qk_norm + 2 * model.hidden


def _biases(model: ModelConfig) -> int:
    """Biases of one layer's attention."""
    inner = (model.heads + 2 * model.kv_heads) * model.head_dim
    return {"none": 0, "qkv": inner, "all": inner + model.hidden}[model.attention_bias]


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that a batch of tokens is multiplied with: all but norms and the table of embeddings. Includes the head,
    and every expert: a batch of some dozens of tokens chooses them all."""
    return model.layers * layer_parameters(model, max(1, model.experts)) + head_parameters(model)


def active_parameters(model: ModelConfig) -> int:
    """Weights that one token is multiplied with: of experts, the chosen ones."""
    chosen = model.active_experts if model.experts else 1
    return model.layers * layer_parameters(model, chosen) + head_parameters(model)


def layer_parameters(model: ModelConfig, experts: int) -> int:
    """Matrices of one layer with so many feed-forward networks: attention's four; the router; three of each network."""
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.hidden * (2 * query + 2 * key_value + model.experts + 3 * model.ff * experts)


def linear_layers(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a block's linear layers, by their names in transformers; experts are none."""
    query, key_value, hidden = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden
    attention = {"q_proj": (query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden)}
    attention["o_proj"] = (hidden, query)
    if model.experts:
        return attention
    return attention | {"gate_proj": (model.ff, hidden), "up_proj": (model.ff, hidden), "down_proj": (hidden, model.ff)}


def adapter_parameters(model: ModelConfig, training: TrainingConfig) -> int:
    """Parameters of all adapters, 0 where there are none: of each layer with one, rank times inputs and outputs."""
    layers = linear_layers(model)
    sides = sum(sum(layers[name]) for name in training.lora_targets or layers)
    return model.layers * training.lora_rank * sides


def block_parameters(model: ModelConfig, experts: int) -> int:
    """Parameters of one layer with so many feed-forward networks: matrices, norms, biases."""
    return layer_parameters(model, experts) + _norms(model) + _biases(model)


def expert_parameters(model: ModelConfig) -> int:
    """Weights of all experts of all layers, the router's not."""
    return model.layers * model.hidden * 3 * model.ff * model.experts


def head_parameters(model: ModelConfig) -> int:
    """The matrix that makes logits; as large as the table of embeddings."""
    return model.vocabulary * model.hidden


def bytes_per_number(model: ModelConfig) -> int:
    """Bytes of a number in the model's dtype."""
    return 2 if model.dtype == "bfloat16" else 4


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of one copy of the weights, in the model's dtype."""
    return parameters(model) * bytes_per_number(model)


def sent_bytes(model: ModelConfig, training: TrainingConfig) -> int:
    """Bytes of a version on its way to an engine: of all weights, or of adapters."""
    return (adapter_parameters(model, training) or parameters(model)) * bytes_per_number(model)


def served_bytes(model: ModelConfig, fp8: bool) -> int:
    """Bytes of an engine's copy. fp8: a byte for each number of layers' matrices; their scales are left out."""
    saved = bytes_per_number(model) - 1 if fp8 else 0
    return weight_bytes(model) - saved * (matmul_parameters(model) - head_parameters(model))


def kv_bytes_per_token(model: ModelConfig, length: float = 0.0) -> float:
    """Keys and values of one token in all layers (Pope et al., arXiv 2211.05102, section 3.3), in a sequence of so many
    tokens: a layer with a sliding window keeps no more than the window."""
    return 2 * _attending(model, length) * model.kv_heads * model.head_dim * bytes_per_number(model)


def _attending(model: ModelConfig, length: float) -> float:
    """Layers, one with a sliding window counted as the part of a sequence that its last token sees."""
    window = length if model.sliding_window is None else min(length, model.sliding_window)
    return model.layers - (model.sliding_layers * (1 - window / length) if length else 0)


def _attending_pairs(model: ModelConfig, length: float) -> float:
    """Layers, one with a sliding window counted as its share of the pairs that a full one has: in a sequence of n
    tokens a window of w leaves w n - w^2 / 2 of n^2 / 2."""
    window = length if model.sliding_window is None else min(length, model.sliding_window)
    return model.layers - (model.sliding_layers * (1 - window / length) ** 2 if length else 0)


def forward_flops_per_token(model: ModelConfig) -> int:
    """Two for every weight that a token is multiplied with, the head's too (Kaplan et al., arXiv 2001.08361, section
    2.1; Chowdhery et al., arXiv 2204.02311, appendix B)."""
    return 2 * active_parameters(model)


def prefill_flops_per_token(model: ModelConfig) -> int:
    """Operations of `forward_flops_per_token`, less the head's: only a prompt's last token needs logits."""
    return 2 * (active_parameters(model) - head_parameters(model))


def forward_flops_per_pair(model: ModelConfig, length: float = 0.0) -> float:
    """Attention, for the square of a sequence's length: scores and weighted values are 2 heads x head_dim each for
    every pair of tokens, and causal attention needs half of the pairs (Chowdhery et al., appendix B, gives both pairs
    and a backward pass: 12 layers x heads x head_dim for each token and each token before or after it). length: of a
    typical sequence, where layers have sliding windows."""
    return 2 * _attending_pairs(model, length) * model.heads * model.head_dim


def decode_flops_per_cached_token(model: ModelConfig, length: float = 0.0) -> float:
    """Attention of one new token to one that is in the cache. length: as above."""
    return 4 * _attending(model, length) * model.heads * model.head_dim


def train_passes(recompute: bool) -> int:
    """Training in forward passes: a backward pass costs two (Kaplan et al., section 2.1); where activations are not
    kept, layers are computed once more (Chen et al., arXiv 1604.06174)."""
    return 4 if recompute else 3


def train_flops_per_token(model: ModelConfig, adapters: int = 0, recompute: bool = False) -> float:
    """Operations of a forward and a backward pass for each token, besides attention. adapters: their parameters, where
    they alone are trained: then weights have no gradients, only what comes into them has, which is one pass less."""
    passes = train_passes(recompute)
    return (passes - bool(adapters)) * forward_flops_per_token(model) + passes * 2 * adapters


def sample_flops(
    model: ModelConfig, prompt: int, response: int, scorings: int, epochs: int = 1, adapters: int = 0
) -> float:
    """Operations that one sample of so many tokens needs, each thing once: its prompt is read and its response sampled,
    it is scored `scorings` times, and trained on `epochs` times. What is computed twice (activations, prompts that no
    cache has) counts once, as in the model FLOPs of Chowdhery et al., appendix B. adapters: as `train_flops_per_token`;
    their own part of other passes is left out."""
    tokens, times = prompt + response, epochs * train_passes(recompute=False) + scorings
    products = epochs * train_flops_per_token(model, adapters) + scorings * forward_flops_per_token(model)
    passes = tokens * products + times * tokens * tokens * forward_flops_per_pair(model)
    read = prompt * prefill_flops_per_token(model) + prompt * prompt * forward_flops_per_pair(model)
    cached = prompt * response + response * response // 2
    return passes + read + response * forward_flops_per_token(model) + cached * decode_flops_per_cached_token(model)
