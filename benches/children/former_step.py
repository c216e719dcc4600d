# pyright: reportMissingImports=false, reportAssignmentType=false
"""One program of the former system, compiled for TPUs that are not there: `python former_step.py ROW FOLDER`.

`benches.former_system` runs it with the jax of that system's day, `MLLM_SRC` naming a checkout; ROW is an object with
the fields of `Row`. What the compiler says goes to FOLDER: answer.json, and of a program also its text. The system's
own modules are imported as they are. Replaced is only what needs a network, weights, torch or a device that is there.
"""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "JAX_PLATFORMS": "cpu",
}
sys.path.insert(0, os.environ["MLLM_SRC"])

import flax.linen  # noqa: F401  before torch is replaced: it may look for a real one
import optax  # noqa: F401

TOPOLOGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v6e-8": ("v6e:2x4", {"chips_per_host_bounds": (2, 4, 1)}),
    "v4-16": ("v4:2x2x2", {"chips_per_host_bounds": (2, 2, 1), "chip_config_name": "megacore"}),
}
MODELS = {
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
EOS, PAD = 151645, 151643


def replace_imports() -> None:
    """Empty modules in the place of those that the programs do not use."""

    def stub(name: str, **names: Any) -> None:
        module = sys.modules[name] = types.ModuleType(name)
        module.__dict__.update(names)

    stub("torch")
    stub("transformers", AutoConfig=None, AutoTokenizer=None, PretrainedConfig=object, PreTrainedConfig=object)
    stub("transformers.configuration_utils", PretrainedConfig=object)
    stub("transformers.utils", logging=types.SimpleNamespace(get_logger=lambda *_: None))
    stub("transformers.modeling_rope_utils", rope_config_validation=None)
    stub("webdataset")
    stub("math_verify", parse=None, verify=None, ExprExtractionConfig=None)
    import MLLM_JAX.train_modules  # noqa: F401  what training2 imports later
    import training2  # noqa: F401

    del sys.modules["torch"]  # einops looks for it when it is called


class ModelConfig(types.SimpleNamespace):
    """Of a model, as their code reads transformers': hashable by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def model_config(name: str) -> ModelConfig:
    known = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768, "attention_dropout": 0.0}
    return ModelConfig(**MODELS[name], **known)


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """The tree that their conversion of weights makes, in float32; a tied head is an array of its own in it."""
    import jax
    import jax.numpy as jnp

    D, F = config.hidden_size, config.intermediate_size
    head = D // config.num_attention_heads
    Q, K = config.num_attention_heads * head, config.num_key_value_heads * head

    def f(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def product(inner: int, outer: int, *, bias: bool = False) -> dict[str, Any]:
        return {"kernel": f(inner, outer)} | ({"bias": f(outer)} if bias else {})

    layer = {
        "input_layernorm": {"scale": f(D)},
        "post_attention_layernorm": {"scale": f(D)},
        "mlp": {"gate_proj": product(D, F), "up_proj": product(D, F), "down_proj": product(F, D)},
        "self_attn": {
            "q_proj": product(D, Q, bias=True),
            "k_proj": product(D, K, bias=True),
            "v_proj": product(D, K, bias=True),
            "o_proj": product(Q, D),
        },
    }
    layers = {f"layers_{i}": layer for i in range(config.num_hidden_layers)}
    embedding = {"embed_tokens": {"embedding": f(config.vocab_size, D)}, "norm": {"scale": f(D)}}
    return {"model": embedding | layers, "lm_head": product(D, config.vocab_size)}


class AbstractJit:
    """In the place of `jax` where their state is made: its jit gives shapes, with the shardings that it was given."""

    def __getattr__(self, name: str) -> Any:
        import jax

        return getattr(jax, name)

    def jit(self, function: Any, donate_argnums: Any = (), out_shardings: Any = None) -> Any:
        """What calls the function abstractly."""
        import jax

        def place(made: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding, weak_type=made.weak_type)

        return lambda *arguments: jax.tree.map(place, jax.eval_shape(function, *arguments), out_shardings)


def update(row: dict[str, Any], mesh: Any) -> Any:
    """Their train step, lowered."""
    import jax
    import jax.numpy as jnp
    import training2
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from MLLM_JAX.language.llama.llama import LlamaJaxConfig
    from MLLM_JAX.language.qwen2.modular_qwen2 import Qwen2ForCausalLM
    from plugins.training.update.optimizer import OptimizerConfig, build_tx
    from plugins.training.update.train_step import training_step

    config = model_config(row["model"])
    model = Qwen2ForCausalLM(config, LlamaJaxConfig(mesh=mesh))
    tokenizer = types.SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)
    training2.get_model = lambda mesh, model_path=None, only_model=False: (model, param_shapes(config), tokenizer)
    training2.jax = AbstractJit()
    rows = row["rows"] * mesh.size
    state, _, _ = training2.get_state(
        mesh,
        training_steps=2,
        grad_accum_steps=row["batch"] // rows,
        model_path="",
        num_pre_q=8,
        max_lengths=row["length"],
        beta=0.0,
        remat_policy=row["remat"],
        policy_loss_impl=row["loss"],
        pallas_block_size=2048,
        pallas_time_block=512,
        pallas_compute_dtype="bf16",
        create_sampler=False,
        tx=build_tx(training_steps=2, cfg=OptimizerConfig(name=row["optimizer"])),
    )
    whole = NamedSharding(mesh, P())  # what their numpy-style slices of a split array come to on jax 0.9.0

    def given(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    inputs = {name: given(jnp.int32, rows, row["length"]) for name in ("input_ids", "attention_mask", "labels")}
    inputs |= {name: given(jnp.float32, rows) for name in ("rewards", "advantages")}
    inputs |= {"group_ids": given(jnp.int32, rows), "total_valid_token_count": given(jnp.int32)}
    return jax.jit(training_step, donate_argnums=(0,)).lower(state, inputs)


def decode(row: dict[str, Any], mesh: Any) -> Any:
    """Their loop of decoding with both of its faster paths, lowered; `rows` sequences of a chip."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from MLLM_JAX.language.llama.llama import LlamaJaxConfig
    from MLLM_JAX.language.qwen2.modular_qwen2 import Qwen2ForCausalLM
    from MLLM_JAX.utils import get_partition_rules_llama, match_partition_rules
    from plugins.sample import mllm_sampler
    from plugins.sample.optimizations.qwen2_decode_attention import patch_qwen2_attention_decode_fast

    patch_qwen2_attention_decode_fast()
    config, (B, T) = model_config(row["model"]), (row["rows"] * mesh.size, row["length"])
    jax.device_count = lambda *_: mesh.size  # the sampler splits its key by it
    tokenizer = types.SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)
    sampler = mllm_sampler.Sampler(Qwen2ForCausalLM(config, LlamaJaxConfig(mesh=mesh)), tokenizer, mesh=mesh)
    shapes = param_shapes(config)
    params = jax.tree.map(
        lambda each, spec: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        match_partition_rules(get_partition_rules_llama(), shapes),
    )
    split, whole = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())

    def given(dtype: Any, *shape: int, sharding: Any = split) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    head = config.hidden_size // config.num_attention_heads
    kv = given(jnp.bfloat16, B, config.num_key_value_heads, T, head)
    layer = {"k": kv, "v": kv, "end_index": given(jnp.int32, B)}
    state = mllm_sampler.SampleState(
        decoding_step=given(jnp.int32, sharding=whole),
        num_input_tokens=given(jnp.int32, sharding=whole),
        token_buffer=given(jnp.int32, B, T),
        positions=given(jnp.int32, B, 1),
        cache={f"layer_{i}": layer for i in range(config.num_hidden_layers)},
        attention_mask=given(jnp.int32, B, T),
        next_token_buffer=given(jnp.int32, B),
        key=given(jnp.uint32, 2, sharding=whole),
        dones=given(jnp.bool_, B),
        sample_steps=given(jnp.int32, B),
    )

    def loop(state: Any, params: Any) -> Any:  # around their infer(), as theirs
        return jax.lax.while_loop(
            lambda state: (state.decoding_step < T - 1) & ~jnp.all(state.dones),
            lambda state: sampler.infer(state, params),
            state,
        )

    return jax.jit(loop, donate_argnums=(0,)).lower(state, params)


def main(row_json: str, folder: str) -> None:
    """Compile one row as far as memory is assigned, or `whole`: this compiler refuses only after it made the code."""
    import threading

    replace_imports()
    import jax
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import Mesh

    row, out = json.loads(row_json), Path(folder)
    whole = row["whole"]
    name, options = TOPOLOGIES[row["tpu"]]
    devices = topologies.get_topology_desc(name, platform="tpu", **options).devices
    mesh = Mesh(mesh_utils.create_device_mesh((1, len(devices), 1), devices=devices), ("dp", "fsdp", "tp"))
    lowered = (decode if row["phase"] == "decode" else update)(row, mesh)
    answer: dict[str, Any] = {"jax": jax.__version__, "says": ""}
    failed: list[str] = []

    def run() -> None:
        try:
            lowered.compile(compiler_options={"xla_dump_to": folder})
        except Exception as error:  # the compiler's own text is the answer
            failed.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive() and (whole or not list(out.glob("*.after_optimizations_after_buffer_assignment.txt"))):
        thread.join(0.1)
    answer["says"] = failed[0] if failed else ""
    (out / "answer.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
