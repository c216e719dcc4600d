"""Bugs of the model, of an update, and of its forms, for `test_planted_bugs.py` to plant."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from planted_runs import Plant

from podium.algorithms import routers
from podium.models import architecture, decoder, expert_mixture
from podium.models.attention.mask import Visibility
from podium.models.blocks import routing
from podium.models.files import gguf_config, hf_config
from podium.models.files.gguf_metadata import mixture_keys
from podium.sharding import ShardingRules
from podium.train import step
from podium.train.batches import samples

# The model.


def off_by_one_attention() -> Plant:
    """A token sees the one behind it, which it is to predict."""
    original = Visibility.mask

    def planted(visibility):
        T = visibility.segments.shape[1]
        return original(visibility) | jnp.eye(T, k=1, dtype=bool)[None]

    return Visibility, "mask", planted


def temperature_after_softmax() -> Plant:
    original = step.token_logprobs

    def planted(hidden, head, targets, settings, *others):
        found = original(hidden, head, targets, dataclasses.replace(settings, temperature=1.0), *others)
        return found._replace(logprobs=found.logprobs / settings.temperature)

    return step, "token_logprobs", planted


def adapters_unscaled() -> Plant:
    """(xA)B is multiplied by alpha and not by alpha / rank."""
    return architecture.Lora, "scale", property(lambda lora: lora.alpha)


def adapters_of_other_matrices() -> Plant:
    """LoRA trains the attention's matrices alone, whatever `lora.targets` says."""
    original = architecture.make_lora

    def planted(config):
        made = original(config)
        return made and dataclasses.replace(made, targets=("q", "v"))

    return architecture, "make_lora", planted


def gates_of_all_experts() -> Plant:
    """The gates of the chosen experts are not divided by their sum."""
    original = routing.route
    return routing, "route", lambda *given, **options: original(*given, **{**options, "normalized": False})


def experts_of_another_token() -> Plant:
    """Tokens go to the experts that the sampler chose for the token after them."""
    original = samples._choices

    def planted(spans):
        found = original(spans)
        return None if found is None else np.roll(found, -1, axis=0)

    return samples, "_choices", planted


# An update, and its forms.


def bfloat16_sum() -> Plant:
    """The gradient of the head is summed in bfloat16."""
    original = step.head_weights

    @jax.custom_vjp
    def rounded(x):
        return x

    def backward(_, dx):
        return (dx.astype(jnp.bfloat16).astype(dx.dtype),)

    rounded.defvjp(lambda x: (x, None), backward)
    return step, "head_weights", lambda *given, **options: rounded(original(*given, **options))


def tied_head_without_gradient() -> Plant:
    original = step.head_weights
    return step, "head_weights", lambda *given, **options: jax.lax.stop_gradient(original(*given, **options))


def mean_of_means() -> Plant:
    """Each micro-batch is averaged over its own tokens, and then the averages over the micro-batches."""
    original = step._micro_batch

    def planted(whole, index):
        own = original(whole, index)
        share = whole.num_tokens / (whole.num_micro_batches * jnp.maximum(jnp.sum(own.mask), 1.0))
        return dataclasses.replace(own, weights=own.weights * share)

    return step, "_micro_batch", planted


def leaked_segment() -> Plant:
    """A token of a packed row sees all that stands before it."""
    original = step.row_attention

    def planted(backend, visibility, rules):
        one = (visibility.segments > 0).astype("int32")
        return original(backend, Visibility(one, one), rules)

    return step, "row_attention", planted


def prompts_unseen_over_split_rows() -> Plant:
    """Where devices split the tokens of rows, completions do not see their prompt's segment."""
    original = step.row_attention

    def planted(backend, visibility, rules):
        split = rules.num_shards("tokens") > 1
        own = dataclasses.replace(visibility, prompts=visibility.segments) if split else visibility
        return original(backend, own, rules)

    return step, "row_attention", planted


# Gradients that devices add in number formats other than float32.


def norm_scales_without_gradient() -> Plant:
    """Rounding norm scales and biases to bfloat16 stops their gradients."""
    original = decoder.layer_weight

    def planted(*given, **options):
        made = original(*given, **options)
        alone = options["wide"] and isinstance(made, jax.Array)
        return jax.lax.stop_gradient(made) if alone else made

    return decoder, "layer_weight", planted


def experts_averaged_over_devices() -> Plant:
    original = expert_mixture._scattered

    def planted(dx, dim, names, mesh):
        return original(dx, dim, names, mesh) / math.prod(mesh.shape[name] for name in names)

    return expert_mixture, "_scattered", planted


def experts_of_split_rows_averaged() -> Plant:
    """Over devices that split the tokens of rows, and the experts' width."""
    original = expert_mixture._scattered
    return (
        expert_mixture,
        "_scattered",
        lambda dx, dim, names, mesh: original(dx, dim, names, mesh) / mesh.shape.get("sp" if "sp" in names else "", 1),
    )


def weights_averaged_over_devices() -> Plant:
    """Of the matrices whose gradients are float32 beside products in bfloat16."""
    original = ShardingRules.weight_sums

    def planted(rules, x, *axes):
        return original(rules, x / rules.num_shards("batch"), *axes)

    return ShardingRules, "weight_sums", planted


def head_of_the_first_piece() -> Plant:
    """The gradient of the head, summed in float32 beside products in bfloat16, is that of one piece of the batch."""
    original = ShardingRules.sums_of_copies

    def planted(rules, x, *axes, **options):
        every = original(rules, x, *axes, **options)
        first = jnp.arange(len(every)).reshape(-1, *[1] * x.ndim) == 0
        return jnp.where(first, every, 0)

    return ShardingRules, "sums_of_copies", planted


def bfloat16_averaged_over_devices() -> Plant:
    """With `reduce_dtype: bfloat16`, of all matrices but the head and the experts."""
    original = ShardingRules.constrain_weight

    def planted(rules, x, *axes):
        if x.dtype != jnp.bfloat16:
            return original(rules, x, *axes)
        share = 1 / rules.num_shards("batch")
        return original(rules, x * share + jax.lax.stop_gradient(x * (1 - share)), *axes)

    return ShardingRules, "constrain_weight", planted


def balance_of_mean_probabilities() -> Plant:
    """A router's probabilities are averaged over rows, and not over all tokens."""

    def planted(router):
        load, shares = routers._load(router), jnp.mean(router.shares, axis=1)
        return load.shape[-1] * jnp.sum(load * shares, axis=-1)

    return routers, "_balance_loss", planted


def gguf_experts_not_normalised() -> Plant:
    """A GGUF file's mixture is read without what its architecture implies."""
    family = gguf_config.FAMILIES["qwen3_moe"]
    form = dataclasses.replace(family.gguf, keys=lambda metadata, raw: mixture_keys(metadata))
    return gguf_config, "FAMILIES", {**gguf_config.FAMILIES, "qwen3_moe": dataclasses.replace(family, gguf=form)}


def aliases_left_out() -> Plant:
    """A key of config.json under another name is left out, so that its default counts."""
    original = hf_config.settings_of

    def planted(raw, family, where):
        return original({key: value for key, value in raw.items() if key not in family.keys.aliases}, family, where)

    return hf_config, "settings_of", planted
