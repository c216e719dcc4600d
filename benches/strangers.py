"""Models from strangers: 2,000 damaged and hostile model folders, each refused by one ModelError or rightly loaded.

    python -m benches.strangers        (CPU; about 10 minutes, next to no disk; needs the extra demo)

A tiny model is written as a Hugging Face folder, with its weights in one file or in shards, and as a GGUF file. Each
trial damages one file at random: a value of its JSON is replaced by one that a reader may trip over (null, a text,
2^62, a path outside, a thousand brackets, ...), keys are dropped, bytes are flipped, cut off or put in, numbers of
binary headers become large, a chat template gets a loop that does not end. Then the model is loaded as a run loads it:
description, tokenizer, a conversation, weights. Right is: one ModelError, or a model whose conversation has tokens of
its vocabulary and whose weights have the shapes of its description; within 5 s of processor time; no file beside the
model's folder opened, which inotify watches. Trials run in a process of its own, which is ended after a minute.
"""

import collections
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benches.recipes import write_tiny_model
from benches.record import arguments, record

TRIALS = 2_000
LIMIT_S = 5.0  # of the processor, for one model
HUNG_S = 60.0
QUESTION = "What is 3 + 4 ?"
VALUES: Sequence[Any] = (
    None, True, False, -1, 0, 1, 3, 10**9, 2**31, 2**62, 2**64, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf"),
    "", "x", "0", "../outside/x.safetensors", "../outside", "{outside}/x.json", "\u0000", "x" * 100_000,
    [], [[]], [None], [-1], [2**62], ["x", 5], {}, {"a": None}, {"rope_type": "llama3"}, {"__type": "AddedToken"},
)  # fmt: skip
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '{outside}/x.json' %}",
    "{% import '../outside/x.json' as x %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages[9].content }}",
    "{{ 1 / 0 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 10 ** 10 ** 10 ** 10 }}",
    "{{ ((((((((((",
    "{% if %}",
    "{{ messages|sort|join(messages) }}",
    "{{ raise_exception('no') }}",
)
BINARY_NUMBERS = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def write_models(folder: Path) -> None:
    """The models that are damaged: `whole`, `shards` and `gguf`, and beside them a folder `outside`."""
    from safetensors.numpy import load_file, save_file

    write_tiny_model(folder / "whole")
    shutil.copytree(folder / "whole", folder / "shards")
    tensors = load_file(folder / "whole" / "model.safetensors")
    (folder / "shards" / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / "shards" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "whole" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    (folder / "gguf").mkdir()
    _write_gguf(folder / "gguf" / "model.gguf", json.loads((folder / "whole" / "config.json").read_text()), tensors)
    (folder / "outside").mkdir()
    shutil.copy(folder / "whole" / "model.safetensors", folder / "outside" / "x.safetensors")
    shutil.copy(folder / "whole" / "tokenizer.json", folder / "outside" / "x.json")


def _write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    import gguf

    from benches.recipes import VOCAB

    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.": "ffn_", "_proj": "", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * 3 + [1] * (len(VOCAB) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{{ messages[-1].content }}")
    for name, value in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paths_of(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON document its values stand."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(inner, (*path, key))


def damage_json(path: Path, draw: random.Random) -> str:
    """Replaces, drops, adds or wraps a value; what was done."""
    outside = str(path.parents[1] / "outside")
    document = json.loads(path.read_text())
    shallow = [each for each in paths_of(document, ()) if each and len(each) <= 2]
    where: tuple[Any, ...] = draw.choice(
        shallow if draw.randrange(2) else [each for each in paths_of(document, ()) if each]
    )
    parent = document
    for key in where[:-1]:
        parent = parent[key]
    how = draw.choice(("replaced", "replaced", "replaced", "dropped", "wrapped", "added"))
    value = draw.choice(VALUES)
    value = value.replace("{outside}", outside) if isinstance(value, str) else value
    if how == "dropped":
        del parent[where[-1]]
    elif how == "wrapped":
        parent[where[-1]] = [parent[where[-1]]]
    elif how == "added" and isinstance(parent, dict):
        names = ("rope_scaling", "head_dim", "tokenizer_file", "vocab_file", "auto_map", "eos_token_id", "layer_types")
        parent[draw.choice(names)] = value
    else:
        parent[where[-1]] = value
    path.write_text(json.dumps(document))
    return f"{how} {'.'.join(map(str, where))[:60]}"


def damage_bytes(path: Path, draw: random.Random) -> str:
    """Flips, cuts, inserts or overwrites bytes, mostly at the beginning, where headers are; what was done."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(min(len(data), draw.choice((32, 400, 4_000, len(data)))))
    how = draw.choice(("flipped", "number", "number", "cut", "inserted", "brackets"))
    if how == "flipped":
        for _ in range(draw.choice((1, 1, 8))):
            data[draw.randrange(at + 1)] ^= 1 << draw.randrange(8)
    elif how == "number":
        code = draw.choice(("<I", "<Q"))
        size = struct.calcsize(code)
        data[at : at + size] = struct.pack(code, draw.choice(BINARY_NUMBERS) % 2 ** (8 * size))
    elif how == "cut":
        del data[at:]
    else:
        data[at:at] = b'{"a":[' * 20_000 if how == "brackets" else draw.randbytes(draw.choice((1, 3, 200)))
    path.write_bytes(data)
    return f"{how} at {at}"


def damage_template(path: Path, draw: random.Random) -> str:
    """Puts a hostile piece into a chat template, or changes a few of its characters; what was done."""
    folder = path.parent
    piece = draw.choice(TEMPLATES).replace("{outside}", str(folder.parent / "outside"))
    text = path.read_text() if path.exists() else "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}"
    if draw.randrange(3):
        at = draw.randrange(len(text) + 1)
        path.write_text(piece if draw.randrange(2) else text[:at] + piece + text[at:])
        return f"{piece[:40]}"
    changed = list(text)
    for _ in range(draw.choice((1, 3))):
        changed[draw.randrange(len(changed))] = draw.choice("{}%()[]'|.*9 x")
    path.write_text("".join(changed))
    return "characters"


@dataclasses.dataclass(frozen=True)
class Damage:
    """A kind of trial: which model, which of its files, and what is done to it."""

    model: str
    file: str
    harm: Callable[[Path, random.Random], str]


KINDS = (
    *(Damage("whole", f"{name}.json", damage_json) for name in ("config", "tokenizer", "tokenizer_config")),
    Damage("whole", "generation_config.json", damage_json),
    *(Damage("whole", name, damage_bytes) for name in ("config.json", "tokenizer.json", "model.safetensors")),
    Damage("whole", "chat_template.jinja", damage_template),
    Damage("shards", "model.safetensors.index.json", damage_json),
    Damage("shards", "a.safetensors", damage_bytes),
    Damage("gguf", "model.gguf", damage_bytes),
    Damage("gguf", "model.gguf", damage_bytes),
)


def load(source: str) -> None:
    """Loads a model as a run does. Raises ModelError where it is refused, AssertionError where it is wrong."""
    import jax

    from podium.models.files.hf import load_params
    from podium.models.files.source import read_architecture, resolve
    from podium.models.params import TRAIN_AXES, param_specs
    from podium.models.text.tokenizer import load_tokenizer
    from podium.sharding import ShardingRules, make_mesh

    found = resolve(source)
    config = read_architecture(found)
    tokenizer = load_tokenizer(found)
    tokenizer.check_vocab(config.vocab)
    tokens = tokenizer.encode_chat(QUESTION, None)
    assert all(isinstance(token, int) and 0 <= token < config.vocab for token in tokens), f"tokens {tokens}"
    tokenizer.decode(tokens)
    params = load_params(found, config, ShardingRules(make_mesh("auto", jax.devices()[:1]), TRAIN_AXES))
    shapes = {name: spec.shape for name, spec in param_specs(config).items()}
    assert {name: value.shape for name, value in params.items()} == shapes, "shapes"
    jax.block_until_ready(params)


@contextlib.contextmanager
def opened_in(folder: Path) -> Iterator[Callable[[], bool]]:
    """Whether any file of the folder was opened, by whatever code: inotify's word."""
    libc, flags = ctypes.CDLL(None, use_errno=True), os.O_NONBLOCK | os.O_CLOEXEC
    watch = libc.inotify_init1(flags)
    libc.inotify_add_watch(watch, bytes(folder), 0x20)  # IN_OPEN

    def opened() -> bool:
        try:
            return bool(os.read(watch, 4096))
        except BlockingIOError:
            return False

    try:
        yield opened
    finally:
        os.close(watch)


def trial(folder: Path, seed: int) -> dict[str, Any]:
    """Damages a copy of a model below `folder`, where `write_models` wrote them, and loads it; what came of it."""
    from podium.models.architecture import ModelError

    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    with tempfile.TemporaryDirectory(dir=folder, prefix="trial-") as scratch:
        shutil.copytree(folder / kind.model, Path(scratch) / "model")
        shutil.copytree(folder / "outside", Path(scratch) / "outside")
        target = Path(scratch) / "model" / kind.file
        what = kind.harm(target, draw)
        start = time.process_time()
        with opened_in(Path(scratch) / "outside") as opened:
            try:
                load(str(target if kind.model == "gguf" else target.parent))
                outcome = "loaded"
            except ModelError as error:
                outcome = "refused" if str(error) else "WRONG: an error without a word"
            except BaseException as error:  # of any type: that is what is counted
                outcome = f"WRONG: {type(error).__name__}: {str(error)[:200]}"
            seconds = time.process_time() - start
            outcome = "WRONG: a file outside was opened" if opened() else outcome
    if seconds > LIMIT_S:
        outcome = f"WRONG: {seconds:.1f} s"
    return {"seed": seed, "file": kind.file, "damage": what, "outcome": outcome, "cpu_s": seconds}


def serve(folder: str, connection: Connection) -> None:
    """Carries out the trials whose seeds come, in a process of its own."""
    from podium.hosts.platform import prepare_platform

    prepare_platform()
    load(f"{folder}/whole")  # imports and compiles
    connection.send("ready")
    while (seed := connection.recv()) is not None:
        connection.send(trial(Path(folder), seed))


def trials(folder: Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row per trial; a process that hangs or dies is one, and another goes on."""
    context = multiprocessing.get_context("spawn")
    waiting, seed = collections.deque(seeds), -1
    while waiting:
        ours, theirs = context.Pipe()
        worker = context.Process(target=serve, args=(str(folder), theirs))
        worker.start()
        theirs.close()
        try:
            assert ours.recv() == "ready"
            while waiting:
                seed = waiting.popleft()
                ours.send(seed)
                if not ours.poll(HUNG_S):
                    yield {"seed": seed, "outcome": f"WRONG: hung for {HUNG_S:g} s", "cpu_s": HUNG_S}
                    break
                yield ours.recv()
            else:
                ours.send(None)
        except EOFError:
            yield {"seed": seed, "outcome": "WRONG: the process died", "cpu_s": 0.0}
        finally:
            worker.join(5)
            worker.kill()
            worker.join()
            ours.close()


def main() -> None:
    """Prints and writes the counts; exit status 1 where a trial is wrong."""
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each has the next")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch))
        rows = list(trials(Path(scratch), range(args.seed, args.seed + args.trials)))
    counts = collections.Counter((str(row.get("file")), row["outcome"].partition(":")[0]) for row in rows)
    for (file, how), count in sorted(counts.items()):
        print(f"{count:5} {how:8} {file}")
    wrong = [row for row in rows if row["outcome"].startswith("WRONG")]
    for row in wrong:
        print(row)
    table = [{"file": file, "outcome": how, "count": count} for (file, how), count in sorted(counts.items())]
    slowest = max(rows, key=lambda row: row["cpu_s"])
    record("strangers-cpu", {"trials": len(rows), "wrong": wrong, "outcomes": table, "slowest": slowest}, args.results)
    print(f"{len(rows)} trials, {len(wrong)} wrong, the slowest {slowest['cpu_s']:.1f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
