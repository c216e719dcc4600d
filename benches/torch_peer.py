"""The demo's step as one would write it in torch for this CPU: what benches/torch_step.py compares Podium with.

Completions: bfloat16 weights with fused projections, one static cache, prompts prefilled once per group, finished rows
dropped from the batch as it goes. Update: transformers' own model in float32 under bfloat16 autocast, micro-batches of
full sequences, logits of completions only, fused AdamW. Needs torch, which Podium does not.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
import transformers

KEPT_SHARE = 0.85  # rows are dropped from the batch when no more than this share of them is alive
MASKED = -1e30


class Clock(Protocol):
    """Adds what happens inside `with clock(name):` to that name."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time a part."""
        ...


@dataclasses.dataclass(frozen=True)
class Row:
    """A completion to learn from."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    advantage: float
    weight: float


class Sampler:
    """Draws completions with a bfloat16 copy of a Llama."""

    def __init__(self, model: Any, max_positions: int) -> None:
        config = model.config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.eps = config.rms_norm_eps
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(max_positions).float()[:, None] * torch.cat([frequencies, frequencies])
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()  # [positions, Q]
        self.load(model)

    @torch.no_grad()
    def load(self, model: Any) -> None:
        """Take the model's weights as they are now."""
        self.embed = model.model.embed_tokens.weight.bfloat16()
        self.final_norm = model.model.norm.weight.bfloat16()
        self.layers = [
            (
                layer.input_layernorm.weight.bfloat16(),
                _fused(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                _fused(layer.self_attn.o_proj),
                layer.post_attention_layernorm.weight.bfloat16(),
                _fused(layer.mlp.gate_proj, layer.mlp.up_proj),
                _fused(layer.mlp.down_proj),
            )
            for layer in model.model.layers
        ]

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        completions: int,
        max_new_tokens: int,
        eos_tokens: Sequence[int],
        generator: torch.Generator,
        clock: Clock,
    ) -> list[list[int]]:
        """Tokens of each prompt's completions, one after another; end-of-sequence included."""
        width = max(map(len, prompts))
        with clock("rollout/prefill"):
            logits, cache, padding = self._prefill(prompts, width, max_new_tokens)
            logits, padding = (x.repeat_interleave(completions, 0) for x in (logits, padding))
            cache = cache.repeat_interleave(completions, 2)
        drawn: list[list[int]] = [[] for _ in range(len(prompts) * completions)]
        rows = list(range(len(drawn)))  # which completion each row of the batch is
        ended: set[int] = set()
        for end in range(width, width + max_new_tokens):
            with clock("rollout/sample"):
                new = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
                for row, token in zip(rows, new.tolist(), strict=True):
                    if row not in ended:
                        drawn[row].append(token)
                        ended |= {row} if token in eos_tokens else set()
            alive = [place for place, row in enumerate(rows) if row not in ended]
            if not alive or end == width + max_new_tokens - 1:
                break
            with clock("rollout/decode"):
                if len(alive) <= KEPT_SHARE * len(rows):
                    rows = [rows[place] for place in alive]
                    cache, padding, new = cache[:, :, alive], padding[alive], new[alive]
                seen = torch.arange(end + 1)[None] >= padding[:, None]
                positions = end - padding[:, None]
                logits = self._logits(new[:, None], positions, _bias(seen[:, None]), cache, end)
        return drawn

    def _prefill(
        self, prompts: Sequence[Sequence[int]], width: int, max_new_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [B, V] behind each prompt, the cache, and how far each prompt is padded on the left."""
        padding = torch.tensor([width - len(prompt) for prompt in prompts])
        tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        positions = (torch.arange(width)[None] - padding[:, None]).clamp(min=0)
        place = torch.arange(width)
        seen = (place[None] <= place[:, None]) & (place[None, None] >= padding[:, None, None])  # [B, T, T]
        shape = (len(self.layers), 2, len(prompts), self.kv_heads, width + max_new_tokens, self.head_dim)
        cache = torch.zeros(shape, dtype=torch.bfloat16)
        return self._logits(tokens, positions, _bias(seen), cache, 0), cache, padding

    def _logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor, cache: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Float32 logits [B, V] behind the last of these tokens [B, T], which enter the cache at `start`."""
        B, T = tokens.shape
        H, K, Q, end = self.heads, self.kv_heads, self.head_dim, start + T
        x = self.embed[tokens]
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]  # [B, T, 1, Q]
        for index, (attention_norm, qkv, o, mlp_norm, gate_up, down) in enumerate(self.layers):
            h = F.linear(F.rms_norm(x, x.shape[-1:], attention_norm, self.eps), qkv).view(B, T, H + 2 * K, Q)
            qk, v = h.split((H + K, K), dim=2)
            qk = qk * cos + torch.cat([-qk[..., Q // 2 :], qk[..., : Q // 2]], -1) * sin
            q, k = qk.split((H, K), dim=2)
            cache[index, 0, :, :, start:end], cache[index, 1, :, :, start:end] = k.transpose(1, 2), v.transpose(1, 2)
            keys, values = cache[index, 0, :, :, :end], cache[index, 1, :, :, :end]  # [B, K, S, Q]
            q = q.transpose(1, 2).reshape(B, K, H // K * T, Q)
            scores = torch.matmul(q, keys.transpose(-1, -2)).float() / Q**0.5
            scores = scores.view(B, K, H // K, T, end) + bias
            shares = scores.softmax(-1).bfloat16().view(B, K, H // K * T, end)
            attended = torch.matmul(shares, values).view(B, H, T, Q).transpose(1, 2).reshape(B, T, H * Q)
            x = x + F.linear(attended, o)
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], mlp_norm, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        x = F.rms_norm(x[:, -1], x.shape[-1:], self.final_norm, self.eps)
        return F.linear(x, self.embed).float()


class Trainer:
    """The model, its optimizer, and the policy gradient on a batch of rows."""

    def __init__(self, folder: Path, *, learning_rate: float, beta1: float, beta2: float, clip_norm: float) -> None:
        transformers.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.train()
        self.clip_norm = clip_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(beta1, beta2), weight_decay=0.0, fused=True
        )

    def update(self, rows: Sequence[Row], *, micro_batch: int, clock: Clock) -> float:
        """One optimizer step; the norm of the gradient before clipping."""
        self.optimizer.zero_grad()
        for first in range(0, len(rows), micro_batch):
            some = rows[first : first + micro_batch]
            with clock("update/forward"):
                loss = self._loss(some)
            with clock("update/backward"):
                loss.backward()
        with clock("update/optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
        return float(norm)

    def _loss(self, rows: Sequence[Row]) -> torch.Tensor:
        """The weighted sum of the rows' token losses, on policy: the ratio is 1, its gradient that of the logprob."""
        width = max(len(row.prompt) + len(row.tokens) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        weights = torch.zeros(len(rows), width)
        for place, row in enumerate(rows):
            start, end = len(row.prompt), len(row.prompt) + len(row.tokens)
            tokens[place, :end] = torch.tensor([*row.prompt, *row.tokens])
            weights[place, start:end] = row.advantage * row.weight
        first = min(len(row.prompt) for row in rows)  # no completion begins earlier
        seen = torch.arange(width)[None] < torch.tensor([len(row.prompt) + len(row.tokens) for row in rows])[:, None]
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(
                input_ids=tokens, attention_mask=seen.long(), logits_to_keep=width - first + 1, use_cache=False
            ).logits
        logprobs = F.log_softmax(logits[:, :-1].float(), -1)
        chosen = logprobs.gather(-1, tokens[:, first:, None])[..., 0]
        return -(chosen * weights[:, first:]).sum()


def _bias(seen: torch.Tensor) -> torch.Tensor:
    """What is added to scores [B, 1, 1, T, S] where a query does not see a key."""
    return torch.zeros(seen.shape).masked_fill(~seen, MASKED)[:, None, None]


def _fused(*layers: Any) -> torch.Tensor:
    """The weights of layers that read the same, one below the other."""
    return torch.cat([layer.weight for layer in layers]).bfloat16()
