# pyright: reportMissingImports=false
"""TRL's GRPOTrainer on the demo: a line of JSON for each step. benches.trl_cpu and benches.trl_gpu call it.

    python -m benches.children.trl_run MODEL FORMAT STEPS SEED [vllm|transformers]

FORMAT is float32, or bfloat16 for autocast. The trainer is as it comes, without checkpointing of activations, which is
only slower here. Sizes, sampling, optimizer and loss are those of configs/demo.yaml; prompts and rewards are the same
task's. With a sampler named, it runs on a GPU: vLLM in the same process, or the generate of transformers, TRL's
default; and a batch is not cut.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benches.demo import CONFIG
from podium.settings import load_settings
from podium.tasks.registry import make_task

MICRO_BATCH = 16
"""Completions of a forward and backward pass; memory grows with it."""


class Lines(transformers.TrainerCallback):
    """Prints seconds of this process, and the mean reward, after each step."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Called after each step with its metrics."""
        if not logs or "reward" not in logs:
            return
        wall, cpu = time.perf_counter(), time.process_time()
        line = {
            "step": state.global_step,
            "wall_s": wall - self.wall,
            "cpu_s": cpu - self.cpu,
            "reward": logs["reward"],
            "gpu_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
        }
        print(json.dumps(line), flush=True)
        self.wall, self.cpu = wall, cpu


def main(model: str, number_format: str, steps: int, seed: int, folder: Path, *, sampler: str | None = None) -> None:
    """Train and print."""
    config = load_settings([CONFIG], [], {}).config
    task, optimizer = make_task(config.tasks[0]), config.train.optimizer
    prompts = {prompt.question: prompt for prompt in task.prompts("train")}
    rows = [{"prompt": [{"role": "user", "content": question}], "question": question} for question in prompts]

    def correct(completions: list[Any], question: list[str], **rest: Any) -> list[float | None]:
        return [task.grade(prompts[q], c[0]["content"]) for q, c in zip(question, completions, strict=True)]

    completions = config.prompts_per_step * config.group_size
    at_once = completions if sampler else MICRO_BATCH
    settings = GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        use_cpu=not sampler,
        use_vllm=sampler == "vllm",
        vllm_mode="colocate",
        bf16=number_format == "bfloat16",
        max_steps=steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=completions // at_once,
        num_generations=config.group_size,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_k=0,
        top_p=1.0,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type=optimizer.schedule,
        warmup_steps=0,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm,
        loss_type="dapo",
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        reward_funcs=correct,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Lines()],
    )
    trainer.train()


if __name__ == "__main__":
    model, number_format, steps, seed, *sampler = sys.argv[1:]
    here = Path(model).parent / "trl"
    main(model, number_format, int(steps), int(seed), here, sampler=sampler[0] if sampler else None)
