"""The memory of configs that differ in one setting, without a plan of each: only what the setting moves is compiled.

Which programs those are is the closed form's to say; whoever searches plans the answer with all programs.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from podium.accelerators import Accelerator
from podium.config.schema import Config
from podium.models.presets import find_decoder
from podium.plan.compile import OnProgress, compile_jobs
from podium.plan.planner import SLOWEST_FIRST, Call, is_compiled, make_jobs, step_calls
from podium.plan.result import Probe
from podium.plan.sizes import make_sizes
from podium.plan.workload import draw_lengths, simulate_rollout


@dataclasses.dataclass(frozen=True)
class Prober:
    """Probes configs for one machine."""

    accelerator: Accelerator
    lengths: str
    fast: bool  # by the closed form alone
    progress: OnProgress | None = None

    def phases(self, configs: Sequence[Config]) -> tuple[str, ...]:
        """The phases whose memory differs between configs, slowest to compile first; all, where none does."""
        kept = [{call.phase: call.closed_form and call.closed_form.parts for call in self.largest(c)} for c in configs]
        moved = [phase for phase in kept[0] if any(each.get(phase) != kept[0][phase] for each in kept)]
        return tuple(sorted(moved or kept[0], key=SLOWEST_FIRST.index))

    def programs(self, config: Config, phases: Iterable[str]) -> dict[str, float]:
        """Of each phase the program that needs most, and the blocks of the cache that its attention reads."""
        largest = {call.phase: call for call in self.largest(config)}
        return {largest[phase].program: largest[phase].blocks for phase in phases if phase in largest}

    def __call__(self, configs: Mapping[int, Config], phases: Sequence[str]) -> list[Probe]:
        """A probe of each value, of these phases; two are compiled at once."""
        if self.fast or not all(is_compiled(config, self.accelerator) for config in configs.values()):
            return [self.estimated(value, config, phases) for value, config in configs.items()]
        decoder = {value: find_decoder(config) for value, config in configs.items()}
        jobs = [
            (value, job)
            for value, config in configs.items()
            for job in make_jobs(config, decoder[value], self.accelerator, self.programs(config, phases))
        ]
        compiled = compile_jobs([job for _, job in jobs], progress=self.progress)
        found = []
        for value in configs:
            own = [(job, each) for (of, job), each in zip(jobs, compiled, strict=True) if of == value]
            job, largest = max(own, key=lambda pair: pair[1].device_bytes)
            size = largest.device_bytes + sum(each.memory.code for _, each in own)
            refused = any(each.refused for _, each in own)
            name = job.phase.partition(":")[0]
            found.append(Probe(value=value, phase=name, bytes=size, refused=refused, compiled=True))
        return found

    def estimated(self, value: int, config: Config, phases: Sequence[str]) -> Probe:
        """By the closed form."""
        forms = [call.closed_form for call in self.largest(config) if call.phase in phases and call.closed_form]
        largest = max(forms, key=lambda form: form.total)
        return Probe(value=value, phase=largest.name, bytes=largest.total, refused=False, compiled=False)

    def largest(self, config: Config) -> list[Call]:
        """The call of each phase that needs most memory, by the closed form; the optimizer's making has none."""
        run = make_sizes(config, find_decoder(config), self.accelerator)
        workload = simulate_rollout(draw_lengths(self.lengths, config), config, shards=run.rollout_shards)
        found: dict[str, Call] = {}
        for call in step_calls(run, workload, micro_batches=1):
            form, held = call.closed_form, found.get(call.phase)
            if form and (held is None or held.closed_form is None or form.total > held.closed_form.total):
                found[call.phase] = call
        return list(found.values())
