"""Bytes of a training rank while it computes: what FSDP2 gathers, keeps and reduces (engines/torch/fsdp.py), what a
forward pass keeps for the backward pass, and the output layer (harness/rl/log_probs.py).

A micro-batch has four moments, of which the largest decides: the loss, when every layer's activations are there and the
output layer works; the backward pass of the last layer; its end, when gradients of embeddings are reduced; the
optimizer's step. Held against a counting allocator by tests/integration/test_measured_memory.py."""

from dataclasses import dataclass

from harness.config import ModelConfig, TrainingConfig
from harness.cost_model.shape import block_parameters, bytes_per_number, head_parameters, parameters, weight_bytes

_CHUNKS_PER_PRODUCT = 4  # gradients that wait for a product, by the bytes of a chunk


@dataclass(frozen=True)
class HeadRows:
    """The output layer's matrix on a rank, [columns, hidden] numbers of `itemsize` bytes. limit: bytes of float32
    logits at a time (training.logit_bytes)."""

    columns: int
    hidden: int
    itemsize: int
    limit: int

    @property
    def chunk(self) -> int:
        """Rows of float32 logits at a time, one at least; a row is never split."""
        return max(1, self.limit // (4 * self.columns))

    def product(self, rows: int) -> int:
        """How many, of so many rows, have their gradients by the logits made for one product: whole chunks in four
        times the limit. What several products add up is a float32 [columns, hidden]: all rows wait for one product
        where they fit into those bytes as well."""
        row, waiting = self.columns * self.itemsize, _CHUNKS_PER_PRODUCT * self.limit
        if rows * row <= waiting + 4 * self.columns * self.hidden:
            return rows
        return self.chunk * max(1, waiting // (self.chunk * row))


LOGITS_AT_ONCE = 3
"""Chunks of logits that exist together in a forward pass: log-probabilities, their exponential, and the product."""


@dataclass(frozen=True)
class PassShape:
    """How a micro-batch is computed on a rank.

    tokens: of one forward and backward pass, padding included; scored: of them, those that get a log-probability.
    ranks: that share the parameters (FSDP); tensor: that share each layer; between: that share what lies between its
    products, too. megatron: as published trainers compute: norms keep what comes in and what goes out, and the
    optimizer works in place. repeated_heads: keys and values are kept once for each query head. gpu: the optimizer
    works on all parameters at once, and products of half precision may come out in float32. logit_bytes: of the output
    layer's logits at a time. adapters: parameters of these, where they alone are trained."""

    tokens: int
    scored: int
    ranks: int = 1
    tensor: int = 1
    between: int = 1
    recompute: bool = False
    megatron: bool = False
    repeated_heads: bool = False
    gpu: bool = True
    expert_ranks: int = 1
    logit_bytes: int = TrainingConfig.logit_bytes
    adapters: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one device of a training rank."""

    model: ModelConfig
    work: PassShape

    @property
    def shards(self) -> int:
        """Devices among which the parameters are divided."""
        return self.work.ranks * self.work.tensor

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded: one rank alone keeps float32 ones whole (engines/torch/fsdp.py)."""
        return self.shards > 1 or self.model.dtype != "float32"

    @property
    def copy(self) -> float:
        """All trained parameters of this device, a float32 each: weights, gradients, and each of AdamW's moments."""
        return 4 * (self.work.adapters or parameters(self.model)) / self.shards

    @property
    def frozen(self) -> float:
        """Bytes of weights that are not trained."""
        return weight_bytes(self.model) / self.shards if self.work.adapters else 0.0

    # -- gathered

    @property
    def embeddings(self) -> float:
        """Gathered as one with the last norm, from the first layer to the last gradient: the tables' parameters."""
        tables = 1 if self.model.tied_embeddings else 2
        return (tables * head_parameters(self.model)) / self.work.tensor + self.model.hidden

    @property
    def block(self) -> float:
        """Parameters of one layer, gathered."""
        experts = max(1, self.model.experts // self.work.expert_ranks)
        return block_parameters(self.model, experts) / self.work.tensor

    @property
    def gathered_embeddings(self) -> float:
        """Bytes of the gathered tables of embeddings, where they are sharded."""
        return self._number * self.embeddings if self.sharded else 0.0

    @property
    def gathered_blocks(self) -> float:
        """The layer at work, and the one that is fetched ahead."""
        adapters = self.work.adapters / self.model.layers
        return 2 * self._number * (self.block + adapters) if self.sharded else 0.0

    @property
    def reducing_block(self) -> float:
        """The gradients of the layer before, in float32, while ranks add them up."""
        return 4 * self._block_gradients if self.sharded else 0.0

    @property
    def _block_gradients(self) -> float:
        """Parameters of one layer that have a gradient."""
        return self.work.adapters / self.model.layers if self.work.adapters else self.block

    @property
    def reducing_embeddings(self) -> float:
        """Bytes at the end of the backward pass: gradients of the tables, and their float32 copy that ranks add up."""
        if not self.sharded or self.work.adapters:
            return 0.0
        return (self._number + 4 + 4 / self.work.ranks) * self.embeddings

    # -- activations

    @property
    def activations(self) -> float:
        """Bytes of activations of all layers: Korthikanti et al., arXiv 2205.05198, section 4, without attention scores
        and dropout masks, for norms that compute in float32. Recomputed: the input of each layer (`recomputed` is the
        rest)."""
        if self.work.recompute:
            per_token = self._number * self.model.hidden / self.work.between
        else:
            per_token = self.layer_bytes_per_token
        return self.work.tokens * self.model.layers * per_token

    @property
    def last_norm(self) -> float:
        """Bytes kept of the norm before the output layer."""
        return self.work.tokens * self._norm_bytes * self.model.hidden / self.work.between

    @property
    def recomputed(self) -> float:
        """Bytes of one layer's activations, where they are computed again."""
        return self.work.tokens * self.layer_bytes_per_token if self.work.recompute else 0.0

    @property
    def layer_bytes_per_token(self) -> float:
        """Bytes kept of one layer: two norms; queries, keys, values and what attention makes of them, with the
        logarithm of its sums; gate, up, silu(gate) and their product in each feed-forward network that the token goes
        through."""
        model, number, tensor = self.model, self._number, self.work.tensor
        query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
        norms = 2 * self._norm_bytes * model.hidden / self.work.between
        heads = (4 + (0 if self.work.adapters else number)) * (query + key_value) if model.qk_norm else 0.0
        kept = query if self.work.repeated_heads else key_value
        attention = number * (2 * query + 2 * kept) + 4 * model.heads
        networks = model.active_experts if model.experts else 1
        routed = 2 * number * model.hidden * model.active_experts  # what goes to experts, and what comes back
        return norms + routed + (heads + attention + 4 * number * model.ff * networks) / tensor

    @property
    def layer_work(self) -> float:
        """Gradients inside of one layer's backward pass: first of the product and one of its factors, of what comes
        out, and of the matrix down; in the end of all matrices."""
        model = self.model
        networks = model.active_experts if model.experts else 1
        inside = 2 * model.ff * networks / self.work.tensor
        first = self.work.tokens * self._number * (inside + model.hidden / self.work.between)
        experts = max(1, model.experts // self.work.expert_ranks)
        down = self._number * model.hidden * model.ff * experts / self.work.tensor
        return max(first + (0 if self.work.adapters else down), self._number * self._block_gradients)

    @property
    def forward_work(self) -> float:
        """Bytes inside of one layer where nothing is kept."""
        model = self.model
        networks = model.active_experts if model.experts else 1
        inside = 3 * model.ff * networks / self.work.tensor
        hidden = 3 * model.hidden / self.work.between + 3 * model.hidden * model.active_experts
        return self.work.tokens * self._number * (inside + hidden)

    # -- the output layer

    @property
    def chunk(self) -> float:
        """Logits of one chunk, in float32."""
        return 4 * self._columns * self._chunk_rows

    @property
    def _columns(self) -> float:
        return self.model.vocabulary / self.work.tensor

    @property
    def _head_rows(self) -> HeadRows:
        return HeadRows(int(self._columns), self.model.hidden, self._number, self.work.logit_bytes)

    @property
    def _chunk_rows(self) -> int:
        return min(self.work.scored, self._head_rows.chunk)

    @property
    def _gradient_rows(self) -> int:
        """Rows of logits whose gradients are made for one product."""
        return min(self.work.scored, self._head_rows.product(self.work.scored))

    @property
    def head_forward(self) -> float:
        """Chunks of logits; on a CPU also both sides of a product in float32."""
        return LOGITS_AT_ONCE * self.chunk + self._widened

    @property
    def head_backward(self) -> float:
        """Bytes of one chunk, of the gradients that wait for a product, where these are more or other numbers, and of
        the matrix's gradient: of one product, and the sum of several in float32."""
        table = head_parameters(self.model) / self.work.tensor
        several, trained = self.work.scored > self._gradient_rows, not self.work.adapters
        apart = self._number == 2 or self._gradient_rows > self._chunk_rows
        waiting = self._number * self._columns * self._gradient_rows if apart else 0.0
        hidden = self._number * self.work.scored * self.model.hidden
        gradient = trained * (self._number * table + (4 * table if several else 0.0))
        return self.chunk + waiting + gradient + hidden + self._widened

    @property
    def head(self) -> float:
        """Bytes of the output layer at its worst moment."""
        return max(self.head_forward, self.head_backward)

    @property
    def head_gradient(self) -> float:
        """Bytes of the output matrix's gradient, from the loss to the end of the backward pass."""
        trained = self.sharded and not self.work.adapters
        return self._number * head_parameters(self.model) / self.work.tensor if trained else 0.0

    # -- the optimizer

    @property
    def optimizer_work(self) -> float:
        """AdamW's root of the second moment: of all parameters at once on a GPU, else of the largest one, twice."""
        if self.work.megatron:
            return 0.0
        if self.work.gpu:
            return self.copy
        experts = 2 * self.model.experts * self.model.ff * self.model.hidden
        return 0.0 if self.work.adapters else 8 * max(head_parameters(self.model), experts) / self.shards

    @property
    def _widened(self) -> float:
        if self.work.gpu or not self.model.float32_logits or self._number == 4:
            return 0.0
        return 4 * (head_parameters(self.model) / self.work.tensor + self._chunk_rows * self.model.hidden)

    @property
    def _number(self) -> int:
        return bytes_per_number(self.model)

    @property
    def _norm_bytes(self) -> int:
        """Bytes for each number of a norm: what comes in, in float32; what is normalised, which the gradient of its
        weights needs; and what goes out."""
        if self.work.megatron:
            return 2 * self._number
        return 4 + self._number * (1 if self.work.adapters else 2)
